"""A layer of routed experts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rackmount_registry.axes import Axis
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import (
    DispatchContext,
    ExpertBundle,
    ExpertKernel,
    Routing,
    TokenDispatcher,
)
from rackmount_registry.formats import StoredFormat
from rackmount_registry.nn.linear import Gemm
from rackmount_registry.nn.socket import Binding, Socket, Survey, splitting
from rackmount_registry.nn.storage import LinearPart, StoredWeight


class Experts(Socket):
    """x [T, hidden] -> the weighted sum of each token's experts, [T, hidden].

    Stored under its path: `gate.weight` [experts, hidden] and `experts.{e}.gate_proj`, `.up_proj`,
    `.down_proj`.
    """

    uses = frozenset({"route"})
    by_row = True
    kernel: ExpertKernel
    dispatcher: TokenDispatcher
    prepared: Any

    def __init__(self, hidden: int, experts: Axis, ffn: Axis, routing: Routing) -> None:
        super().__init__()
        if routing.top_k > experts.count:
            raise ConfigError(
                f"top_k={routing.top_k} is above the number of experts, {experts.count}"
            )
        self.hidden, self.experts, self.ffn, self.routing = hidden, experts, ffn, routing

    def survey(self, survey: Survey) -> None:
        mesh = survey.mesh
        if mesh.group(self.ffn) is mesh.group(self.experts) and mesh.group(self.ffn).size > 1:
            raise ConfigError("one group of ranks cannot split both the experts and their width")
        gate = LinearPart(f"{self.path}.gate", self.experts.count, self.hidden, role="router")
        self.gate = Gemm(
            [0], [gate], survey.format_of(gate.name, gate.shape, gate.role), survey, bias=False
        )
        self.local = mesh.cut(self.experts)
        self.away = [
            e for e in range(self.experts.count) if not self.local.start <= e < self.local.stop
        ]
        names = [f"{self.path}.experts.{e}" for e in range(self.local.start, self.local.stop)]
        wide, narrow = (self.ffn, self.hidden), (self.hidden, self.ffn)
        gate_up = [
            [
                LinearPart(f"{name}.{part}", *wide, role="expert")
                for part in ("gate_proj", "up_proj")
            ]
            for name in names
        ]
        down = [[LinearPart(f"{name}.down_proj", *narrow, role="expert")] for name in names]
        stored = self._common_format(survey, gate_up + down)
        self.gate_up = StoredWeight(gate_up, stored, mesh, stacked=True)
        self.down = StoredWeight(down, stored, mesh, stacked=True)
        self.mesh = mesh

    def _common_format(self, survey: Survey, bundle: list[list[LinearPart]]) -> StoredFormat:
        """The one format of all experts: one kernel runs both products."""
        formats = {
            survey.format_of(part.name, part.shape, part.role) for parts in bundle for part in parts
        }
        if len(formats) != 1:
            listed = ", ".join(sorted(stored.name for stored in formats))
            raise ConfigError(
                f"{self.path}: the experts of a layer must share one format, not {listed}"
            )
        return formats.pop()

    def weights(self) -> Iterator[StoredWeight]:
        yield self.gate.weight
        yield self.gate_up
        yield self.down

    def bind(self, binding: Binding) -> None:
        self.ops = binding.ops
        self.gate.bind(binding)
        context = DispatchContext(
            num_experts=self.experts.count,
            local_experts=self.local,
            group=self.mesh.group(self.experts),
            top_k=self.routing.top_k,
            hidden_size=self.hidden,
            dtype=binding.dtype,
            device=binding.device,
        )
        self.kernel, self.dispatcher = binding.experts(self.gate_up.stored.yields, context)
        summed = (self.ffn,) if self.dispatcher.reduces else (self.ffn, self.experts)
        self.pending = splitting(self.mesh, *summed)

    def answers_for(self) -> Iterator[str]:
        for weight, projections in (
            (self.gate_up, ("gate_proj", "up_proj")),
            (self.down, ("down_proj",)),
        ):
            for expert in self.away:
                for projection in projections:
                    for suffix in weight.storages:
                        yield f"{self.path}.experts.{expert}.{projection}.{suffix}"

    def finish(self) -> None:
        self.gate.finish()
        bundle = ExpertBundle(gate_up=self.gate_up.finish(), down=self.down.finish())
        self.prepared = self.kernel.prepare(bundle)

    def forward(self, x: Tensor) -> Tensor:
        expert_ids, weights = self.ops.route(self.gate(x), self.routing)
        given = self.dispatcher.dispatch(x, expert_ids, weights)
        return self.reduced(self.dispatcher.combine(self.kernel.run(given, self.prepared), given))
