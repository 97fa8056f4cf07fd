"""The choice of compute parts for a draft, explained, and their loading."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from rackmount_registry.capabilities import Demand
from rackmount_registry.descriptors import ExpertKernel as ExpertKernelDescriptor
from rackmount_registry.descriptors import LinearKernel as LinearKernelDescriptor
from rackmount_registry.descriptors import OpSet, TokenDispatcher
from rackmount_registry.errors import PluginError, SelectionError
from rackmount_registry.experts import DispatchContext, ExpertKernel
from rackmount_registry.experts import TokenDispatcher as TokenDispatcherPart
from rackmount_registry.formats import LinearKernel
from rackmount_registry.mount.draft import Draft
from rackmount_registry.offers import Offer
from rackmount_registry.ops import OPS, STEP_OPS, Ops
from rackmount_registry.options import GivenOptions, instantiate
from rackmount_registry.plugins import PluginManager
from rackmount_registry.selection import (
    Choice,
    ExpertsChoice,
    choose_each,
    choose_experts,
    choose_ops,
)


@dataclass(frozen=True, kw_only=True)
class PartsChoice:
    """Which part serves what, with every refusal. Nothing is imported before `load`."""

    ops: Mapping[str, Choice[OpSet]]
    """By operation."""
    linear: Mapping[str, Choice[LinearKernelDescriptor]]
    """By weight format."""
    experts: Mapping[str, ExpertsChoice]
    """By weight format of the bundle."""

    def offers(self) -> list[Offer[Any]]:
        """Every part that was chosen."""
        single = [*self.ops.values(), *self.linear.values()]
        pairs = self.experts.values()
        return [
            *(choice.winner for choice in single if choice.winner is not None),
            *(choice.kernel for choice in pairs),
            *(choice.dispatcher for choice in pairs),
        ]

    def load(self, options: GivenOptions = MappingProxyType({})) -> "Parts":
        """Imports what was chosen.

        Raises:
            SelectionError: nothing fits somewhere.
            PluginError: a part cannot be imported.
        """
        ops = {op: _operation(op, choice.require()) for op, choice in self.ops.items()}
        return Parts(
            ops=cast(Ops, SimpleNamespace(**ops)),
            kernels={
                form: (instantiate(choice.require(), options), choice.require().descriptor)
                for form, choice in self.linear.items()
            },
            expert_parts={
                form: (
                    instantiate(choice.kernel, options),
                    partial(instantiate, choice.dispatcher, options),
                )
                for form, choice in self.experts.items()
            },
        )


def _operation(op: str, offer: Offer[OpSet]) -> Any:
    found = getattr(offer.load(), op, None)
    if found is None:
        raise PluginError(
            f"op_set {offer.name!r} of {offer.distribution} {offer.version} offers {op}, and "
            f"{offer.descriptor.factory} has none"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Loaded parts of one engine."""

    ops: Ops
    kernels: Mapping[str, tuple[LinearKernel, LinearKernelDescriptor]]
    """By weight format."""
    expert_parts: Mapping[str, tuple[ExpertKernel, Any]]
    """By weight format: a kernel, and what makes a dispatcher for a layer."""

    def linear(self, weight_format: str) -> LinearKernel:
        """The kernel for a weight format."""
        return self.kernels[weight_format][0]

    def epilogues(self, weight_format: str) -> tuple[str, ...]:
        """What that kernel can do to its product."""
        return self.kernels[weight_format][1].epilogues

    def prologues(self, weight_format: str) -> tuple[str, ...]:
        """After which operations that kernel can round its input."""
        return self.kernels[weight_format][1].prologues

    def experts(
        self, weight_format: str, context: DispatchContext
    ) -> tuple[ExpertKernel, TokenDispatcherPart]:
        """The kernel for a weight format, and a dispatcher for one layer of experts."""
        kernel, dispatcher = self.expert_parts[weight_format]
        return kernel, dispatcher(context)


def select_parts(
    manager: PluginManager,
    draft: Draft,
    demand: Demand,
    *,
    requested: Mapping[str, str] | None = None,
    opted_in: frozenset[str] = frozenset(),
) -> PartsChoice:
    """Chooses operations, linear kernels and experts' parts for `demand` (device and dtype).

    Args:
        requested: kind -> name asked for; the rest is "auto".

    Raises:
        SelectionError: what was asked for does not fit, or no pair of experts' parts does.
    """
    asked = requested or {}
    formats = draft.formats()
    used = frozenset(STEP_OPS).union(*(socket.uses for socket in draft.sockets))
    kernels = manager.offers(LinearKernelDescriptor.kind)
    if not formats["expert"]:
        _refuse_unused(asked)
    ops = choose_ops(
        manager.offers(OpSet.kind),
        demand,
        [op for op in OPS if op in used],
        asked.get(OpSet.kind, "auto"),
        opted_in,
        manager.broken,
    )
    if "norm_gate" in ops and ops["norm_gate"].winner is not ops["gate"].winner:
        del ops["norm_gate"]  # the mount does without it; nobody's router is passed over
    return PartsChoice(
        ops=ops,
        linear=choose_each(
            LinearKernelDescriptor.kind,
            kernels,
            {form: replace(demand, weight_format=form) for form in sorted(formats["linear"])},
            asked.get(LinearKernelDescriptor.kind, "auto"),
            opted_in,
            manager.broken,
        ),
        experts={
            form: choose_experts(
                manager.offers(ExpertKernelDescriptor.kind),
                manager.offers(TokenDispatcher.kind),
                replace(demand, weight_format=form),
                asked.get(ExpertKernelDescriptor.kind, "auto"),
                asked.get(TokenDispatcher.kind, "auto"),
                opted_in,
                manager.broken,
            )
            for form in sorted(formats["expert"])
        },
    )


def _refuse_unused(asked: Mapping[str, str]) -> None:
    """A part that was asked for and has nothing to do is no choice that was honoured."""
    for kind in (ExpertKernelDescriptor.kind, TokenDispatcher.kind):
        if (name := asked.get(kind, "auto")) != "auto":
            why = f"{kind}={name!r} was asked for, and the model has no experts; leave it 'auto'"
            raise SelectionError(why, ())
