"""Weight formats: how a scheme stores a linear weight, and the named formats that kernels take.

A quantization scheme sees neither ranks nor fusing. For each logical weight it lists `Slot`s, the
tensors of the checkpoint, with named dimensions; the mount derives sharding, fusing and the
experts' bundle from the names. `finish` turns what was loaded into a `Weight` of a format that is
specified here.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Role = Literal["linear", "expert", "router", "head"]
"""What a weight is for: schemes treat routers and heads apart."""

Activation = Literal["plain", "token", "tensor", "group"]
"""How a scheme rounds a product's input to the weight's type: not at all; with a scale for each
token; with one static scale; with a scale for each token and 128 columns."""

BLOCK = 128
"""Rows and columns of a weight that share a scale in "fp8_blocks"."""


@dataclass(frozen=True)
class Dim:
    """A dimension of a stored tensor.

    `axis` "out" or "in" follows the weight's rows or columns, one entry per `per` of them, rounded
    up at the end; "part" has one entry for each logical weight of a fused one, whose own tensor
    need not have that dimension; "fixed" has `per` entries, alike on all ranks.
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
    optional: bool = False
    """The checkpoint may lack it, for all parts or for none; `finish` is then given none."""


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
    group: int = 0
    """Stored columns that share a scale, in formats with groups."""
    activation: Activation = "plain"
    """How the scheme rounds the input of products. A kernel may round so, with "tensor" by the
    tensor "input_scale" float32 [1] (x = rounded * scale); or leave the input as it is, which is
    more exact."""

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
        tensors = {
            name: tensor if name == "input_scale" else tensor[index]
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)


@dataclass(frozen=True)
class WeightFormat:
    """A named format: which tensors a `Weight` holds, and what they mean."""

    name: str
    tensors: Mapping[str, str]
    """Name -> shape and meaning."""
    dequantize: Callable[[Weight], Tensor]


def _scaled_rows(weight: Weight) -> Tensor:
    return weight.tensors["values"].float() * weight.tensors["scales"].unsqueeze(-1)


def _scaled_blocks(weight: Weight) -> Tensor:
    """Every part begins a row of blocks; its last one may be cut off."""
    values = weight.tensors["values"].float()
    rows = torch.cat(
        [torch.arange(size) // BLOCK + first for size, first in _block_rows(weight.parts)]
    ).to(values.device)
    columns = torch.arange(values.shape[-1], device=values.device) // BLOCK
    scales = weight.tensors["scales"].index_select(-2, rows).index_select(-1, columns)
    return values * scales


def _block_rows(parts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows of each part, and its first row of blocks."""
    counts = [-(-size // BLOCK) for size in parts]
    return [(size, sum(counts[:index])) for index, size in enumerate(parts)]


def unpack_int4(words: Tensor) -> Tensor:
    """int32 [..., W] -> uint8 [..., 8 W]: the lowest four bits of a word come first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2)


def _scaled_groups(weight: Weight) -> Tensor:
    tensors, scales = weight.tensors, weight.tensors["scales"].float()
    values = tensors["values"]
    order, middle = tensors.get("order"), 128.0
    if weight.format == "int4_groups":
        values, middle = unpack_int4(values), 8.0
    stored = weight.in_features if order is None else order.shape[-1]
    group = torch.arange(stored, device=values.device) // weight.group
    zeros = (
        tensors["zeros"].float() if "zeros" in tensors else scales.new_full(scales.shape, middle)
    )
    zeros, scales = zeros.index_select(-1, group), scales.index_select(-1, group)
    dense = (values[..., :stored].float() - zeros) * scales
    if order is None:
        return dense
    where = order.long().where(order >= 0, weight.in_features)  # one column more, for padding
    where = where.unsqueeze(-2).expand(dense.shape)
    spread = dense.new_zeros(*dense.shape[:-1], weight.in_features + 1)
    return spread.scatter_(-1, where, dense)[..., :-1].contiguous()


_GROUPS = {
    "scales": "float16, bfloat16 or float32 [out, G], one for each `group` of the S stored columns",
    "zeros": "optional uint8 [out, G]: the value that stands for 0; absent: the middle one",
    "order": "optional int32 [S]: the input that a stored column is multiplied with; -1: none, the "
    "column is padding; absent: S is `in`, and columns stand in order",
}

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
            _scaled_rows,
        ),
        WeightFormat(
            "fp8_rows",
            {
                "values": "float8_e4m3fn [out, in]",
                "scales": "float32 [out]; row r of the weight is values[r] * scales[r]",
            },
            _scaled_rows,
        ),
        WeightFormat(
            "fp8_blocks",
            {
                "values": "float8_e4m3fn [out, in]",
                "scales": "float32 [block rows, ceil(in / 128)], one for each block of 128 x 128; "
                "every part begins a block row of its own",
            },
            _scaled_blocks,
        ),
        WeightFormat(
            "int4_groups",
            {
                "values": "int32 [out, ceil(S / 8)]: stored column j is bits 4 (j % 8) to "
                "4 (j % 8) + 3 of word j // 8, 0 to 15, and stands for (value - zero) * scale",
                **_GROUPS,
            },
            _scaled_groups,
        ),
        WeightFormat(
            "int8_groups",
            {"values": "uint8 [out, S], each for (value - zero) * scale", **_GROUPS},
            _scaled_groups,
        ),
    )
}


@dataclass(frozen=True)
class StoredFormat:
    """How a scheme stores one linear weight. Parts of equal stored format may be fused."""

    name: str
    slots: tuple[Slot, ...]
    """One called "bias" is there only where the model has no bias of its own."""
    yields: str
    """Name of the weight format that `finish` gives: known before any tensor is read."""
    finish: Callable[[Mapping[str, Tensor], tuple[int, ...], int], Weight] = field(compare=False)
    """`finish(tensors by suffix, parts, in_features)`. Acts on the last dimensions: a bundle of
    experts comes with a leading one. Tensors keep their addresses where nothing is converted.
    Raises `CheckpointError` with the rule that values break; the mount adds the layer."""
    encode: Callable[[Tensor], Mapping[str, Tensor]] | None = field(default=None, compare=False)
    """`encode(weight [out, in])`, whole and in plain floats -> the tensors that a checkpoint stores
    for it, rounded to nearest. None: the format is only read."""
    held_bytes: Callable[[int, int], int] | None = field(default=None, compare=False)
    """`held_bytes(rows, columns)` of the tensors that `finish` gives for a matrix, at the least:
    what would not fit is refused before it is loaded. None: what is stored."""


def _finish_dense(
    tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int
) -> Weight:
    return Weight("dense", {"weight": tensors["weight"]}, parts, in_features)


DENSE = StoredFormat("dense", (Slot("weight", (Dim("out"), Dim("in"))),), "dense", _finish_dense)
"""A plain matrix in the model's dtype: what every weight is unless a scheme says otherwise."""


@dataclass(frozen=True, kw_only=True)
class KVCacheScheme:
    """How a checkpoint wants its KV cache stored."""

    dtype: Literal["float8_e4m3fn"] = "float8_e4m3fn"
    per: Literal["tensor", "head"] = "tensor"
    """What has a scale of its own: a layer's keys or values, or each head of them."""
    key_map_names: Callable[[str], tuple[str, str] | None] | None = None
    """`key_map_names(name)` of the module "...self_attn": names, beside its projections, of the
    tensors that are its `attention.KeyMaps`, `q` and `k`. None, here or given: there are none."""


class QuantizationScheme(Protocol):
    """Says for each logical weight how the checkpoint stores it."""

    kv_cache: KVCacheScheme | None
    """None: the checkpoint says nothing about it."""

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """The format of the weight `name` (without ".weight") of whole shape [out, in]; None for
        dense."""

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Optional: entries of its lists that mean none of the model's `modules`. A slip, or a
        list for several models: reports name them."""


EPILOGUES = ("silu_mul", "add")
"""Names of `LinearKernel`'s optional methods: `run_` and one of these."""

PROLOGUES = ("norm", "silu_mul")
"""The same: `round_` and one of these, with `rounds`."""


@dataclass(frozen=True)
class Rounded:
    """A product's input as its kernel rounded it: x [T, in] is about values * scales."""

    values: Tensor
    """[T, in], in the type that the kernel multiplies."""
    scales: Tensor
    """Of a shape that is the kernel's own."""

    def __len__(self) -> int:
        return len(self.values)


class LinearKernel(Protocol):
    """A GEMM over the weight formats that its descriptor declares.

    It is called at any T, 0 included, and enqueues work on the current stream alone: `run` may be
    captured in a CUDA graph. `run_silu_mul`, and `adds` with `run_add`, are there where the
    descriptor's `epilogues` say so; `rounds`, with `round_norm` or `round_silu_mul`, where its
    `prologues` do. What these two give is taken for x, by epilogues too.

    What uses programmatic dependent launch waits (`griddepcontrol.wait`) before it lets the next
    kernel start: kernels after a product rely on all before it being complete.
    """

    def prepare(
        self,
        weight: Weight,
        uses: Collection[str] = (),
        dtype: torch.dtype | None = None,
        bias: bool = False,
    ) -> Any:
        """Repacks once, after loading; what it returns is handed to every `run`.

        `uses` are the methods that will be called, "run" or an epilogue's name, as far as that is
        known, with x in `dtype`, and with a bias or without: what must be compiled for them may be
        compiled from here on. The mount leaves out `dtype` and `bias` where a kernel's `prepare`
        does not name them.
        """

    def run(self, x: Tensor | Rounded, prepared: Any, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out], in the dtype of activations."""

    def run_silu_mul(self, x: Tensor | Rounded, prepared: Any, bias: Tensor | None) -> Tensor:
        """silu(first half) * second half of the product's rows: x [T, in] -> [T, out / 2]. The
        weight has two parts of equal size."""

    def adds(self, prepared: Any, num_rows: int) -> bool:
        """Whether `run_add` is faster for so many rows than to leave the sum to what reads it."""

    def run_add(
        self, x: Tensor | Rounded, prepared: Any, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """The product plus residual [T, out] -> [T, out]."""

    def rounds(self, prepared: Any, num_rows: int) -> bool:
        """Whether products of so many rows round their input, as the weight's `activation` says, so
        that who makes the input may give it rounded."""

    def round_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, prepared: Any
    ) -> tuple[Rounded, Tensor]:
        """The ops `rms_norm` and `add_rms_norm` with a rounded result: (norm(x + residual),
        x + residual), or (norm(x), x) without a residual."""

    def round_silu_mul(self, gate: Tensor, up: Tensor, prepared: Any) -> Rounded:
        """The op `silu_mul` with a rounded result; gate and up [T, in] may be views of one
        tensor."""
