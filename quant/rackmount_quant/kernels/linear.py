"""What the linear kernels for quantized weights have in common: few rows at memory speed by one
Triton kernel, many rows in a way of their own."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.elementwise import gather_columns, silu_mul
from rackmount_quant.kernels.few_rows import few_rows_kernel
from rackmount_quant.kernels.many_rows import dequantize
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.tuning import Choose, Tiling
from rackmount_registry.device.ahead import AheadCompiler, traits
from rackmount_registry.device.launch import launch_options
from rackmount_registry.formats import EPILOGUES, Rounded, Weight

SIZES = (
    *("N", "K", "x_stride", "residual_stride"),
    *("row_stride", "block_stride", "scale_stride"),
)
"""Arguments of which a compiled kernel knows no more than whether they are multiples of 16."""
MOST_SCALES_AHEAD = 32
"""Blocks whose scales are called into L2 at a program's start."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A weight, and how its products are made."""

    packed: Packed
    arrivals: Tensor
    """int32, a counter for each tile: zeros between products."""
    tilings: dict[str, tuple[Tiling | None, ...]]
    """Epilogue -> one for each of `tuning.BUCKETS`; None where many rows are multiplied."""
    uses: tuple[str, ...] = ("none",)
    """Epilogues that will be asked for."""
    many: Any = None
    """What a kernel's `many_rows` needs beside."""

    def tiling(self, epilogue: str, rows: int) -> Tiling | None:
        if not 0 < rows <= tuning.MAX_ROWS:
            return None
        return self.tilings[epilogue][tuning.bucket_of(rows)]


class QuantizedLinear:
    """y = x W^T for a quantized weight and x in bfloat16 or float16.

    Few rows are multiplied with the weight as exactly as it is stored. Subclasses pack it, and may
    multiply many rows in another way than with the dequantized matrix, which is rounded to 16 bits.
    """

    def __init__(self, choose: Choose = tuning.choose) -> None:
        self.choose = choose
        self._ahead = AheadCompiler()

    def pack(self, weight: Weight) -> Packed:
        """The weight in words."""
        raise NotImplementedError

    def prepare_many(self, weight: Weight, packed: Packed) -> Any:
        """What `many_rows` needs beside the words."""

    def many_rows(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """The product at any number of rows, 0 included; x has the weight's columns."""
        assert isinstance(x, Tensor)
        return F.linear(x, dequantize(prepared.packed, x.dtype), bias)

    def prepare(
        self,
        weight: Weight,
        uses: Collection[str] = (),
        dtype: torch.dtype | None = None,
        bias: bool = False,
    ) -> Prepared:
        """The weight in words, with a tiling for every number of rows; kernels for `uses` begin to
        be compiled, for bfloat16 where nothing is said of x."""
        packed = self.pack(weight)
        epilogues = tuple("none" if use == "run" else use for use in uses)
        num_tiles = triton.cdiv(packed.n, tuning.MIN_BLOCK_N)
        prepared = Prepared(
            packed=packed,
            arrivals=torch.zeros(num_tiles, dtype=torch.int32, device=packed.words.device),
            tilings={
                epilogue: tuple(self.choose(packed, epilogue, bucket) for bucket in tuning.BUCKETS)
                for epilogue in ("none", *EPILOGUES)
            },
            uses=epilogues or ("none",),
            many=self.prepare_many(weight, packed),
        )
        like = packed.scales.new_empty(packed.n, dtype=dtype or torch.bfloat16)
        for epilogue in epilogues:
            self._compile(prepared, epilogue, like, like if bias else None)
        return prepared

    def _compile(
        self, prepared: Prepared, epilogue: str, like: Tensor, bias: Tensor | None
    ) -> None:
        """Kernels for any number of rows that are like `like`."""
        packed, silu = prepared.packed, epilogue == "silu_mul"
        for rows, tiling in zip(tuning.BUCKETS, prepared.tilings[epilogue], strict=True):
            if tiling is None:
                continue
            x = like.new_empty(rows, packed.k)
            out = like.new_empty(rows, packed.n // 2 if silu else packed.n)
            residual = out if epilogue == "add" else None
            _, arguments = plan(tiling, x, prepared, bias, residual, out, silu)
            aligned = {name: arguments[name] % 16 == 0 for name in SIZES}
            key = traits(few_rows_kernel, arguments | aligned)
            self._ahead.start(few_rows_kernel, key, arguments)

    def run(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        tiling = prepared.tiling("none", len(x))
        if tiling is None or isinstance(x, Rounded):
            return self._many_rows(x, prepared, bias)
        return self._launch(tiling, x, prepared, bias)

    def run_silu_mul(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of the product's halves: x [T, in] -> [T, out / 2]."""
        tiling = prepared.tiling("silu_mul", len(x))
        if tiling is None or isinstance(x, Rounded):
            return silu_mul(self._many_rows(x, prepared, bias))
        return self._launch(tiling, x, prepared, bias, silu=True)

    def adds(self, prepared: Prepared, num_rows: int) -> bool:
        """Where the kernel for few rows makes the product."""
        return prepared.tiling("add", num_rows) is not None

    def run_add(
        self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """The product plus residual [T, out] -> [T, out]."""
        tiling = prepared.tiling("add", len(x))
        if tiling is None or isinstance(x, Rounded):
            return self._many_rows(x, prepared, bias) + residual
        return self._launch(tiling, x, prepared, bias, residual=residual)

    def _many_rows(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """In act-order columns are gathered by a kernel of their own, here and before few rows are
        multiplied: loads of single columns could not be pipelined into shared memory."""
        order = prepared.packed.order
        if order is not None and isinstance(x, Tensor):
            x = gather_columns(x, order)
        return self.many_rows(x, prepared, bias)

    def _launch(
        self,
        tiling: Tiling,
        x: Tensor,
        prepared: Prepared,
        bias: Tensor | None,
        *,
        residual: Tensor | None = None,
        silu: bool = False,
    ) -> Tensor:
        """The product of x [T, in], 0 < T <= MAX_ROWS; rows of x and of the residual may lie
        apart."""
        self._ahead.wait()
        order, n = prepared.packed.order, prepared.packed.n
        x = x if order is None else gather_columns(x, order)
        out = torch.empty((len(x), n // 2 if silu else n), dtype=x.dtype, device=x.device)
        grid, arguments = plan(tiling, x, prepared, bias, residual, out, silu)
        few_rows_kernel[grid](**arguments)
        return out


def plan(
    tiling: Tiling,
    x: Tensor,
    prepared: Prepared,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    silu: bool,
) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and arguments of `few_rows_kernel`."""
    packed = prepared.packed
    rows, n, k = len(x), packed.n, packed.k
    assert x.stride(1) == 1 and x.shape[1] == k and not (silu and n % 2)
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    block_m = tuning.block_m(tuning.BUCKETS[tuning.bucket_of(rows)])
    blocks = triton.cdiv(k, tiling.block_k)
    programs = triton.cdiv(triton.cdiv(n, tiling.block_n) * blocks, tiling.share)
    parts = tiling.parts(k)
    assert parts <= tuning.MAX_PARTS and (packed.group or tiling.block_k) % tiling.block_k == 0
    partials = None
    if parts > 1:
        size = (programs, 2, block_m, tiling.block_n)
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    arguments = {
        **_of_weight(packed, tiling, block_m),
        "x": x,
        "bias": bias,
        "residual": residual,
        "out": out,
        "partials": partials,
        "arrivals": prepared.arrivals,
        "M": rows,
        "N": n,
        "K": k,
        # One row has any stride, and the kernel wants one that keeps rows aligned.
        "x_stride": x.stride(0) if rows > 1 else k,
        "residual_stride": residual.stride(0) if residual is not None and rows > 1 else n,
        "share": tiling.share,
        "BLOCK_M": block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "HALVES": tiling.block_n >= 32 * tiling.warps,
        "PARTS": triton.next_power_of_2(parts),
        "ALIGNED": tiling.aligned(k),
        "EVEN_K": k % tiling.block_k == 0,
        "SILU_MUL": silu,
        "PREFETCH": tiling.prefetch,
        "SCALES_AHEAD": triton.next_power_of_2(min(tiling.share, MOST_SCALES_AHEAD)),
        "COMPILED": x.device.type == "cuda",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    if tiling.registers is not None:
        arguments["maxnreg"] = tiling.registers
    return (programs,), arguments | launch_options(x.device)


def _of_weight(packed: Packed, tiling: Tiling, block_m: int) -> dict[str, Any]:
    """The weight as the kernel reads it."""
    planes = tiling.planes(packed, block_m)
    row_stride, block_stride = packed.strides(tiling.block_k)
    return {
        "words": packed.words.view(torch.int16) if planes else packed.words,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "row_stride": row_stride * (1 + planes),
        "block_stride": block_stride * (1 + planes),
        "scale_stride": packed.scales.shape[-1],
        "FORMAT": packed.format,
        "PLANES": planes,
        "GROUPED": packed.group > 0,
        "BLOCKS_PER_SCALE": max(1, packed.group // tiling.block_k),
        "ROWS_PER_SCALE": packed.rows_per_scale,
    }
