"""A layer of routed experts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rackmount_registry.axes import Axis, Mesh
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import (
    DispatchContext,
    ExpertBundle,
    ExpertKernel,
    ExpertUse,
    RouterState,
    Routing,
    TokenDispatcher,
)
from rackmount_registry.formats import DENSE, StoredFormat
from rackmount_registry.nn.mlp import GatedMLP
from rackmount_registry.nn.socket import Binding, Socket, Survey, splitting, told
from rackmount_registry.nn.storage import LinearPart, Piece, Source, Storage, StoredWeight
from rackmount_registry.ops import prepare
from rackmount_registry.step import wanted_rows


class Experts(Socket):
    """x [T, hidden] -> the weighted sum of each token's experts, [T, hidden].

    Stored beside it is the router, `gate.weight` [experts, hidden], and under its path `{e}` with
    the projections of each expert; or, where these are plain matrices, as transformers 5 spells
    them: `gate_up_proj` [experts, 2 ffn, hidden] and `down_proj` [experts, hidden, ffn] of all.

    Args:
        projections: the checkpoint's names of gate, up and down.
        stored_in: the checkpoint's name of the module around this socket, where it is not the
            model's, which is transformers 5's.
        bias: name, beside this socket, of a float32 vector [experts]; see `ops.route`.
    """

    uses = frozenset({"gate", "norm_gate"})
    by_row = True
    norm_eps: float | None = None
    """Of the norm that `after_norm` will be called for; None: it will not. Set by the mount."""
    kernel: ExpertKernel
    dispatcher: TokenDispatcher
    state: RouterState
    prepared: Any
    router: Tensor
    """[experts, hidden], a plain matrix however it is stored: it is small, and `gate` is one
    kernel."""

    def __init__(
        self,
        hidden: int,
        experts: Axis,
        ffn: Axis,
        routing: Routing,
        *,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        stored_in: str | None = None,
        bias: str | None = None,
    ) -> None:
        super().__init__()
        routing.check(experts.count)
        self.hidden, self.experts, self.ffn, self.routing = hidden, experts, ffn, routing
        self.projections, self.stored_in, self.bias_name = projections, stored_in, bias

    def survey(self, survey: Survey) -> None:
        self.mesh = mesh = survey.mesh
        if mesh.group(self.ffn) is mesh.group(self.experts) and mesh.group(self.ffn).size > 1:
            raise ConfigError("one group of ranks cannot split both the experts and their width")
        self._lay_out_router(survey)
        self.local = mesh.cut(self.experts)
        gate, up, down = self.projections
        names = [self._expert(e) for e in range(self.local.start, self.local.stop)]
        wide, narrow = (self.ffn, self.hidden), (self.hidden, self.ffn)
        gate_up = [
            [LinearPart(f"{name}.{part}", *wide, role="expert") for part in (gate, up)]
            for name in names
        ]
        downs = [[LinearPart(f"{name}.{down}", *narrow, role="expert")] for name in names]
        wide_stored, narrow_stored = self._common_formats(survey, gate_up, downs)
        self.gate_up = self._lay_out_bundle(gate_up, wide_stored, mesh, "gate_up_proj")
        self.down = self._lay_out_bundle(downs, narrow_stored, mesh, "down_proj")

    def _lay_out_router(self, survey: Survey) -> None:
        count = self.experts.count
        part = LinearPart(self._stored("gate"), count, self.hidden, role="router")
        stored = survey.format_of(part.name, part.shape, part.role)
        self.gate = StoredWeight([[part]], stored, survey.mesh, stacked=False)
        self.bias: Storage | None = None
        storages = list(self.gate.storages.values())
        if self.bias_name is not None:
            whole = (slice(0, count),)
            piece = Piece(self._stored(self.bias_name), (count,), whole, whole)
            self.bias = Storage((count,), "float32", [piece])
            storages.append(self.bias)
        if self.stored_in is not None:
            for storage in storages:
                (piece,) = storage.pieces
                name = self.sibling(piece.name.removeprefix(self._stored("")))
                storage.pieces = (replace(piece, others=(Source(name, piece.shape, piece.index),)),)

    def _lay_out_bundle(
        self, bundle: Sequence[Sequence[LinearPart]], stored: StoredFormat, mesh: Mesh, whole: str
    ) -> StoredWeight:
        """The weight, whose plain matrices may also be stored as `whole`, under the socket's
        path."""
        weight = StoredWeight(bundle, stored, mesh, stacked=True)
        if DENSE.slots[0] in stored.slots:
            storage, num_parts = weight.storages[DENSE.slots[0].suffix], len(bundle[0])
            pieces = []
            for number, piece in enumerate(storage.pieces):
                expert = self.local.start + number // num_parts
                (rows, columns), (cut, inner) = piece.shape, piece.index
                above = number % num_parts * rows
                source = Source(
                    f"{self.path}.{whole}",
                    (self.experts.count, num_parts * rows, columns),
                    (
                        slice(expert, expert + 1),
                        slice(above + cut.start, above + cut.stop),
                        inner,
                    ),
                )
                pieces.append(replace(piece, others=(source,)))
            storage.pieces = tuple(pieces)
        return weight

    def _stored(self, name: str) -> str:
        """Checkpoint name of what stands beside the socket."""
        if self.stored_in is None:
            return self.sibling(name)
        around = self.path.rpartition(".")[0]
        return ".".join(filter(None, (around.rpartition(".")[0], self.stored_in))) + f".{name}"

    def _expert(self, index: int) -> str:
        return f"{self._stored(self.path.rpartition('.')[2])}.{index}"

    def _common_formats(
        self, survey: Survey, *bundles: list[list[LinearPart]]
    ) -> list[StoredFormat]:
        """How each bundle is stored: its experts alike, and all for one weight format, since
        one kernel runs both products."""
        formats = [
            {
                survey.format_of(part.name, part.shape, part.role)
                for parts in bundle
                for part in parts
            }
            for bundle in bundles
        ]
        found = frozenset().union(*formats)
        if any(len(each) != 1 for each in formats) or len({each.yields for each in found}) != 1:
            listed = ", ".join(sorted({each.name for each in found}))
            raise ConfigError(
                f"{self.path}: the experts of a layer must share one format, not {listed}"
            )
        return [each.pop() for each in formats]

    def weights(self) -> Iterator[StoredWeight]:
        yield self.gate
        yield self.gate_up
        yield self.down

    def storages(self) -> Iterator[Storage]:
        yield from super().storages()
        if self.bias is not None:
            yield self.bias

    def bind(self, binding: Binding) -> None:
        self.ops, self.step, self.dtype = binding.ops, binding.step, binding.dtype
        self.state = RouterState.fresh(self.experts.count, binding.device)
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
        gate, up, down = self.projections
        for weight, projections in ((self.gate_up, (gate, up)), (self.down, (down,))):
            for expert in range(self.experts.count):
                if not self.local.start <= expert < self.local.stop:
                    for projection in projections:
                        for suffix in weight.storages:
                            yield f"{self._expert(expert)}.{projection}.{suffix}"

    def finish(self) -> None:
        self.router = self.gate.finish().dequantize().to(self.dtype)
        slots = self.step.slots
        arguments = self.router, self.routing, self._bias(), slots, self.state
        prepare(self.ops.gate, *arguments)
        if self.norm_eps is not None:
            row = self.router[:1]  # as a token's features are
            prepare(self.ops.norm_gate, row, row[0], self.norm_eps, *arguments)
        bundle = ExpertBundle(gate_up=self.gate_up.finish(), down=self.down.finish())
        use = ExpertUse(top_k=self.routing.top_k, dtype=self.dtype)
        self.prepared = self.kernel.prepare(bundle, **told(self.kernel.prepare, use=use))

    def _bias(self) -> Tensor | None:
        return self.bias.tensor if self.bias is not None else None

    def _slots(self) -> Tensor:
        return wanted_rows(self.step, self.step.slots) if self.cut else self.step.slots

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.ops.gate(
            x, self.router, self.routing, self._bias(), self._slots(), self.state
        )
        return self._routed(x, ids, weights)

    def after_norm(self, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of x [T, hidden] with the weight `scale`, the experts of that), of as few tokens
        as `norm_gate` takes."""
        assert eps == self.norm_eps
        bias, slots = self._bias(), self._slots()
        normed, ids, weights = self.ops.norm_gate(
            x, scale, eps, self.router, self.routing, bias, slots, self.state
        )
        return normed, self._routed(normed, ids, weights)

    def _routed(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        given = self.dispatcher.dispatch(x, expert_ids, weights)
        return self.reduced(self.dispatcher.combine(self.kernel.run(given, self.prepared), given))


class SparseMLP(nn.Module):
    """experts(x), plus shared_experts(x) where every token has some (arXiv 2401.06066); stored as
    `gate`, `experts` and `shared_experts` under its path.

    No leaf, as `GatedMLP`.
    """

    def __init__(self, experts: Experts, shared_experts: GatedMLP | None = None) -> None:
        super().__init__()
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, x: Tensor) -> Tensor:
        routed = self.experts(x)
        if self.shared_experts is not None:
            routed = routed + self.shared_experts(x)
        return routed  # type: ignore[no-any-return]  # nn.Module calls are Any
