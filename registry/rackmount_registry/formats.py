"""Weight formats: how a scheme stores a linear weight, and the named formats that kernels take.

A quantization scheme sees neither ranks nor fusing. For each logical weight it lists `Slot`s, the
tensors of the checkpoint, with named dimensions; the mount derives sharding, fusing and the
experts' bundle from the names. `finish` turns what was loaded into a `Weight` of a format that is
specified here.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Role = Literal["linear", "expert", "router", "head"]
"""What a weight is for: schemes treat routers and heads apart."""


@dataclass(frozen=True)
class Dim:
    """A dimension of a stored tensor.

    `axis` "out" or "in" follows the weight's rows or columns, one entry per `per` of them, rounded
    up at the end; "part" has one entry for each logical weight of a fused one; "fixed" has `per`
    entries, alike on all ranks.
    """

    axis: Literal["out", "in", "part", "fixed"]
    per: int = 1


@dataclass(frozen=True)
class Slot:
    """One tensor of a stored weight: `NAME.suffix` in the checkpoint."""

    suffix: str
    dims: tuple[Dim, ...]
    dtype: str | None = None
    """None: the model's dtype."""


@dataclass(frozen=True)
class Weight:
    """A weight in a named format, ready for kernels that declare it.

    `tensors` are as `WEIGHT_FORMATS[format]` specifies; an experts' bundle has one more leading
    dimension, the local experts. `parts` are the rows of each logical weight fused into it.
    """

    format: str
    tensors: Mapping[str, Tensor]
    parts: tuple[int, ...]
    in_features: int

    @property
    def out_features(self) -> int:
        return sum(self.parts)

    def dequantize(self, part: int | None = None) -> Tensor:
        """The weight [..., out, in] (or one part's rows) as a dense tensor: what a kernel must be
        equal to."""
        dense = WEIGHT_FORMATS[self.format].dequantize(self)
        if part is None:
            return dense
        return dense.narrow(-2, sum(self.parts[:part]), self.parts[part])

    def expert(self, index: int) -> "Weight":
        """One expert of a bundle."""
        tensors = {name: tensor[index] for name, tensor in self.tensors.items()}
        return Weight(self.format, tensors, self.parts, self.in_features)


@dataclass(frozen=True)
class WeightFormat:
    """A named format: which tensors a `Weight` holds, and what they mean."""

    name: str
    tensors: Mapping[str, str]
    """Name -> shape and meaning."""
    dequantize: Callable[[Weight], Tensor]


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    spec.name: spec
    for spec in (
        WeightFormat(
            "dense",
            {"weight": "[out, in] in the model's dtype"},
            lambda w: w.tensors["weight"],
        ),
        WeightFormat(
            "int8_rows",
            {
                "values": "int8 [out, in]",
                "scales": "float32 [out]; row r of the weight is values[r] * scales[r]",
            },
            lambda w: w.tensors["values"].to(torch.float32) * w.tensors["scales"].unsqueeze(-1),
        ),
    )
}


@dataclass(frozen=True)
class StoredFormat:
    """How a scheme stores one linear weight. Parts of equal stored format may be fused."""

    name: str
    slots: tuple[Slot, ...]
    yields: str
    """Name of the weight format that `finish` gives: known before any tensor is read."""
    finish: Callable[[Mapping[str, Tensor], tuple[int, ...], int], Weight] = field(compare=False)
    """`finish(tensors by suffix, parts, in_features)`. Acts on the last dimensions: a bundle of
    experts comes with a leading one. Tensors keep their addresses where nothing is converted."""


def _finish_dense(
    tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int
) -> Weight:
    return Weight("dense", {"weight": tensors["weight"]}, parts, in_features)


DENSE = StoredFormat("dense", (Slot("weight", (Dim("out"), Dim("in"))),), "dense", _finish_dense)
"""A plain matrix in the model's dtype: what every weight is unless a scheme says otherwise."""


class QuantizationScheme(Protocol):
    """Says for each logical weight how the checkpoint stores it."""

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """The format of the weight `name` (without ".weight") of whole shape [out, in]; None for
        dense."""


EPILOGUES = ("silu_mul", "add")
"""Names of `LinearKernel`'s optional methods: `run_` and one of these."""


class LinearKernel(Protocol):
    """A GEMM over the weight formats that its descriptor declares.

    It is called at any T, 0 included, and enqueues work on the current stream alone: `run` may be
    captured in a CUDA graph. `run_silu_mul`, and `adds` with `run_add`, are there where the
    descriptor's `epilogues` say so.

    What uses programmatic dependent launch waits (`griddepcontrol.wait`) before it lets the next
    kernel start: kernels after a product rely on all before it being complete.
    """

    def prepare(self, weight: Weight, uses: Collection[str] = ()) -> Any:
        """Repacks once, after loading; what it returns is handed to every `run`.

        `uses` are the methods that will be called, "run" or an epilogue's name, as far as that is
        known: what must be compiled for them may be compiled from here on.
        """

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out], in the dtype of `x`."""

    def run_silu_mul(self, x: Tensor, prepared: Any, bias: Tensor | None) -> Tensor:
        """silu(first half) * second half of the product's rows: x [T, in] -> [T, out / 2]. The
        weight has two parts of equal size."""

    def adds(self, prepared: Any, num_rows: int) -> bool:
        """Whether `run_add` is faster for so many rows than to leave the sum to what reads it."""

    def run_add(self, x: Tensor, prepared: Any, bias: Tensor | None, residual: Tensor) -> Tensor:
        """The product plus residual [T, out] -> [T, out]."""
