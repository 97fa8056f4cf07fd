"""Linear projections, alone or merged."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rackmount_registry.axes import Axis
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import Dim, LinearKernel, Rounded, Slot, StoredFormat
from rackmount_registry.nn.socket import Binding, Socket, Survey, splitting, told
from rackmount_registry.nn.storage import LinearPart, Storage, StoredWeight, fusable, lay_out

BIAS = Slot("bias", (Dim("out"),))
"""Of a projection that has one, as the checkpoint holds it."""


class Gemm:
    """One matrix product of a socket: parts of equal format, side by side, with their biases."""

    kernel: LinearKernel
    epilogues: tuple[str, ...]
    prologues: tuple[str, ...]
    dtype: torch.dtype
    prepared: Any
    uses: tuple[str, ...] = ("run",)
    """What will be asked of the kernel; the mount sets it where it fuses."""

    def __init__(
        self,
        indexes: list[int],
        parts: list[LinearPart],
        stored: StoredFormat,
        survey: Survey,
        bias: bool,
    ):
        self.indexes = indexes
        own = ("bias",) if bias else ()
        self.weight = StoredWeight([parts], stored, survey.mesh, stacked=False, own=own)
        self.sizes = list(self.weight.parts)
        self.bias = lay_out([parts], BIAS, survey.mesh, stacked=False) if bias else None
        # Each rank would add the bias of a row-parallel product: the first one alone does.
        self.adds_bias = all(
            group.rank == 0 for group in splitting(survey.mesh, parts[0].in_extent)
        )

    def bind(self, binding: Binding) -> None:
        form = self.weight.stored.yields
        self.kernel, self.dtype = binding.linear(form), binding.dtype
        self.epilogues, self.prologues = binding.epilogues(form), binding.prologues(form)

    def finish(self) -> None:
        prepare, bias = self.kernel.prepare, self._bias() is not None
        facts = told(prepare, dtype=self.dtype, bias=bias)
        self.prepared = prepare(self.weight.finish(), self.uses, **facts)

    def __call__(self, x: Tensor | Rounded) -> Tensor:
        return self.kernel.run(x, self.prepared, self._bias())

    def silu_mul(self, x: Tensor | Rounded) -> Tensor:
        """silu(first part) * second part of the product, where the kernel can."""
        return self.kernel.run_silu_mul(x, self.prepared, self._bias())

    def adds(self, num_rows: int) -> bool:
        """Whether `add` is faster than a sum of its own, where the kernel can add."""
        return self.kernel.adds(self.prepared, num_rows)

    def add(self, x: Tensor | Rounded, residual: Tensor) -> Tensor:
        """The product plus `residual`, where the kernel can."""
        return self.kernel.run_add(x, self.prepared, self._bias(), residual)

    def rounds(self, num_rows: int) -> bool:
        """Whether `round_norm` and `round_silu_mul`, where the kernel has them, make the input of
        so many rows."""
        return self.kernel.rounds(self.prepared, num_rows)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Rounded, Tensor]:
        """(norm of the sum, rounded to be the input, and the sum)."""
        return self.kernel.round_norm(x, residual, weight, eps, self.prepared)

    def round_silu_mul(self, gate: Tensor, up: Tensor) -> Rounded:
        """silu(gate) * up, rounded to be the input."""
        return self.kernel.round_silu_mul(gate, up, self.prepared)

    def _bias(self) -> Tensor | None:
        return self.bias.tensor if self.bias is not None and self.adds_bias else None


class GemmSocket(Socket):
    """Base of the sockets that are one matrix product or several: what is done to them is done to
    each of these."""

    gemms: list[Gemm]
    """Set by `survey`."""

    def bind(self, binding: Binding) -> None:
        for gemm in self.gemms:
            gemm.bind(binding)

    def weights(self) -> Iterator[StoredWeight]:
        return (gemm.weight for gemm in self.gemms)

    def storages(self) -> Iterator[Storage]:
        yield from super().storages()
        yield from (gemm.bias for gemm in self.gemms if gemm.bias is not None)

    def finish(self) -> None:
        for gemm in self.gemms:
            gemm.finish()


class MergedLinear(GemmSocket):
    """Projections of one input that may be fused: parts of equal stored format are one product,
    others stay apart.

    Args:
        in_extent: input features.
        parts: checkpoint name beside this socket -> output features.
        bias: whether every part has one.

    `forward` takes x [T, in] and gives one [T, out of this rank] per part; the outputs may be views
    of one tensor.
    """

    by_row = True

    def __init__(
        self, in_extent: int | Axis, parts: Mapping[str, int | Axis], *, bias: bool = False
    ) -> None:
        super().__init__()
        self.in_extent = in_extent
        self.parts = dict(parts)
        self.bias = bias

    def survey(self, survey: Survey) -> None:
        groups: dict[object, tuple[StoredFormat, list[int], list[LinearPart]]] = {}
        for index, (name, extent) in enumerate(self.parts.items()):
            part = LinearPart(self.sibling(name), extent, self.in_extent)
            stored = survey.format_of(part.name, part.shape, part.role)
            key = stored if fusable(stored) else index
            _, indexes, parts = groups.setdefault(key, (stored, [], []))
            indexes.append(index)
            parts.append(part)
        self.gemms = [
            Gemm(at, parts, stored, survey, self.bias) for stored, at, parts in groups.values()
        ]
        if splitting(survey.mesh, self.in_extent):
            raise ConfigError(
                f"{self.path}: a merged projection takes a whole input; use a Linear for each of "
                f"{', '.join(self.parts)}"
            )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if len(self.gemms) == 1:
            return torch.split(self.gemms[0](x), self.gemms[0].sizes, -1)
        outs = [x] * len(self.parts)
        for gemm in self.gemms:
            for index, out in zip(gemm.indexes, torch.split(gemm(x), gemm.sizes, -1), strict=True):
                outs[index] = out
        return tuple(outs)


class Linear(GemmSocket):
    """One projection x [T, in] -> [T, out]; a split input makes it row-parallel, its output a sum
    over the ranks."""

    by_row = True

    def __init__(
        self, in_extent: int | Axis, out_extent: int | Axis, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.in_extent = in_extent
        self.out_extent = out_extent
        self.bias = bias

    def survey(self, survey: Survey) -> None:
        part = LinearPart(self.path, self.out_extent, self.in_extent)
        stored = survey.format_of(part.name, part.shape, part.role)
        self.gemm = Gemm([0], [part], stored, survey, self.bias)
        self.gemms = [self.gemm]
        self.pending = splitting(survey.mesh, self.in_extent)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduced(self.gemm(x))
