"""What the linear kernels for quantized weights have in common: few rows at memory speed by one
Triton kernel, a single row or up to eight where that was measured by others, many rows in a way of
their own."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.elementwise import gather_columns, silu_mul
from rackmount_quant.kernels.few_rows import few_rows_kernel
from rackmount_quant.kernels.held_tokens import held_tokens_kernel
from rackmount_quant.kernels.many_rows import dequantize
from rackmount_quant.kernels.one_row import one_row_kernel
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.rounding import RoundedRows
from rackmount_quant.kernels.tuning import AnyTiling, Choose, HeldTiling, RowTiling, Tiling
from rackmount_registry.device.ahead import AheadCompiler, traits
from rackmount_registry.device.launch import launch_options
from rackmount_registry.formats import Rounded, Weight

SIZES = (
    *("N", "K", "x_stride", "x_scale_stride", "residual_stride"),
    *("block_stride", "scale_stride", "ratio_stride"),
)
"""Arguments of which a compiled kernel knows no more than whether they are 1 or multiples of 16."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A weight, and how its products are made."""

    packed: Packed
    arrivals: Tensor
    """int32, a counter for each tile: zeros between products."""
    tilings: Mapping[str, tuple[AnyTiling | None, ...]]
    """Epilogue -> one for each of `tuning.BUCKETS`, a RowTiling at most for the first, a HeldTiling
    for up to `tuning.HELD_ROWS`; None where the dequantized matrix is multiplied."""
    uses: tuple[str, ...] = ("none",)
    """Epilogues that will be asked for."""
    many: Any = None
    """What a kernel's `many_rows` needs beside."""

    def tiling(self, epilogue: str, rows: int) -> AnyTiling | None:
        if not 0 < rows <= tuning.MAX_ROWS:
            return None
        return self.tilings[epilogue][tuning.bucket_of(rows)]


class QuantizedLinear:
    """y = x W^T for a quantized weight and x in bfloat16 or float16.

    Few rows are multiplied with the weight as it is stored, up to the rounding of float32 sums: up
    to 16 may meet values in four bits that are 16 larger, and one row values that are 256 larger,
    in eight bits 384. Subclasses pack the weight, and may multiply many rows in another way than
    with the dequantized matrix, which is rounded to 16 bits.
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
            tilings=tuning.for_all(self.choose, packed),
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
        for rows, tiling in zip(tuning.BUCKETS, prepared.tilings[epilogue], strict=True):
            if tiling is not None:
                x = like.new_empty(rows, prepared.packed.k)
                self._begin(tiling, x, prepared, epilogue, bias)

    def _begin(
        self,
        tiling: AnyTiling,
        x: Tensor | RoundedRows,
        prepared: Prepared,
        epilogue: str,
        bias: Tensor | None,
    ) -> None:
        """To compile the kernel that multiplies x."""
        like, n = prepared.packed.scales, prepared.packed.n
        silu = epilogue == "silu_mul"
        out = like.new_empty((len(x), n // 2 if silu else n), dtype=x.dtype)
        residual = out if epilogue == "add" else None
        kernel, _, arguments = plan(tiling, x, prepared, bias, residual, out, silu)
        sizes = {name: arguments[name] for name in SIZES if name in arguments}
        aligned = {name: (size % 16 == 0, size == 1) for name, size in sizes.items()}
        self._ahead.start(kernel, traits(kernel, arguments | aligned), arguments)

    def run(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._run("none", x, prepared, bias)

    def run_silu_mul(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of the product's halves: x [T, in] -> [T, out / 2]."""
        return self._run("silu_mul", x, prepared, bias)

    def adds(self, prepared: Prepared, num_rows: int) -> bool:
        """Where a kernel for few rows makes the product."""
        return prepared.tiling("add", num_rows) is not None

    def run_add(
        self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """The product plus residual [T, out] -> [T, out]."""
        return self._run("add", x, prepared, bias, residual)

    def _run(
        self,
        epilogue: str,
        x: Tensor | Rounded,
        prepared: Prepared,
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        tiling = prepared.tiling(epilogue, len(x))
        if tiling is not None and isinstance(x, Tensor):
            return self._launch(tiling, epilogue, x, prepared, bias, residual)
        return self._run_many(epilogue, x, prepared, bias, residual)

    def _run_many(
        self,
        epilogue: str,
        x: Tensor | Rounded,
        prepared: Prepared,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        product = self._many_rows(x, prepared, bias)
        if epilogue == "silu_mul":
            return silu_mul(product)
        return product if residual is None else product + residual

    def _many_rows(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """In act-order columns are gathered by a kernel of their own, here and before few rows are
        multiplied: loads of single columns could not be pipelined into shared memory."""
        order = prepared.packed.order
        if order is not None and isinstance(x, Tensor):
            x = gather_columns(x, order)
        return self.many_rows(x, prepared, bias)

    def _launch(
        self,
        tiling: AnyTiling,
        epilogue: str,
        x: Tensor | RoundedRows,
        prepared: Prepared,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        """The product of x [T, in], 0 < T <= MAX_ROWS; rows of x and of the residual may lie
        apart."""
        self._ahead.wait()
        packed, silu = prepared.packed, epilogue == "silu_mul"
        if packed.order is not None:
            assert isinstance(x, Tensor)
            x = gather_columns(x, packed.order)
        columns = packed.n // 2 if silu else packed.n
        out = torch.empty((len(x), columns), dtype=x.dtype, device=packed.words.device)
        kernel, grid, arguments = plan(tiling, x, prepared, bias, residual, out, silu)
        kernel[grid](**arguments)
        return out


def plan(
    tiling: AnyTiling,
    x: Tensor | RoundedRows,
    prepared: Prepared,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    silu: bool,
) -> tuple[JITFunction, tuple[int], dict[str, Any]]:
    """The kernel, its grid and its arguments."""
    packed = prepared.packed
    values = x.values if isinstance(x, RoundedRows) else x
    assert values.stride(1) == 1 and not (silu and packed.n % 2)
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    if isinstance(tiling, RowTiling):
        kernel, grid, arguments = _of_one_row(tiling, x, packed)
    elif isinstance(tiling, HeldTiling):
        kernel, grid, arguments = _of_held_tokens(tiling, x, packed, residual)
    else:
        kernel, grid, arguments = _of_few_rows(tiling, x, prepared, residual)
    arguments |= {
        "x": values,
        "bias": bias,
        "residual": residual,
        "out": out,
        "N": packed.n,
        "K": values.shape[1],
        "SILU_MUL": silu,
        "COMPILED": values.device.type == "cuda",
        "num_warps": tiling.warps,
    }
    return kernel, grid, arguments | launch_options(values.device)


def _of_one_row(
    tiling: RowTiling, x: Tensor | RoundedRows, packed: Packed
) -> tuple[JITFunction, tuple[int], dict[str, Any]]:
    """What `plan` gives, as far as it is this kernel's own."""
    block_k = tuning.block_k_of(packed)
    assert isinstance(x, Tensor) and x.shape == (1, packed.k) and block_k is not None
    span = tiling.step * block_k
    arguments = {
        **_of_weight(packed, block_k, torch.int32),
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": block_k,
        "STEP": tiling.step,
        "ONCE": span >= packed.k,
        "EVEN_K": packed.k % span == 0,
    }
    return one_row_kernel, (triton.cdiv(packed.n, tiling.block_n),), arguments


def _of_held_tokens(
    tiling: HeldTiling, x: Tensor | RoundedRows, packed: Packed, residual: Tensor | None
) -> tuple[JITFunction, tuple[int], dict[str, Any]]:
    """What `plan` gives, as far as it is this kernel's own."""
    assert isinstance(x, Tensor) and x.shape[1] == packed.k and len(x) <= tuning.HELD_ROWS
    assert tiling.takes(packed)
    row_stride, block_stride = packed.strides(tuning.HELD_K)
    assert row_stride == tuning.HELD_K // packed.per_word
    tiles, steps = packed.n // tuning.HELD_N, tiling.steps(packed.k)
    arguments = {
        "words": packed.words,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "M": len(x),
        "tiles": tiles,
        # One row has any stride, and the kernel wants one that keeps rows aligned.
        "x_stride": x.stride(0) if len(x) > 1 else packed.k,
        "residual_stride": residual.stride(0) if residual is not None and len(x) > 1 else packed.n,
        "BLOCK_STRIDE": block_stride,
        "SCALE_STRIDE": packed.scales.stride(0),
        "BLOCKS_PER_SCALE": packed.group // tuning.HELD_K,
        "STEPS": steps,
        "EVEN": tiling.warps * steps * tuning.HELD_K == packed.k,
        "UP": packed.n // 2,
        "num_stages": 1,
        "maxnreg": tiling.registers,
    }
    return held_tokens_kernel, (min(tiles, num_sms_of(x.device)),), arguments


def _of_few_rows(
    tiling: Tiling, x: Tensor | RoundedRows, prepared: Prepared, residual: Tensor | None
) -> tuple[JITFunction, tuple[int], dict[str, Any]]:
    """What `plan` gives, as far as it is this kernel's own."""
    packed = prepared.packed
    if isinstance(x, RoundedRows):
        values, x_scales, columns = x.values, x.scales, packed.k + -packed.k % 16
    else:
        values, x_scales, columns = x, None, packed.k
    rows, n, k = len(x), packed.n, values.shape[1]
    assert k == columns
    block_m = tuning.block_m(tuning.BUCKETS[tuning.bucket_of(rows)])
    blocks = triton.cdiv(k, tiling.block_k)
    programs = triton.cdiv(triton.cdiv(n, tiling.block_n) * blocks, tiling.share)
    parts = tiling.parts(k)
    assert parts <= tuning.MAX_PARTS and (packed.group or tiling.block_k) % tiling.block_k == 0
    assert packed.ratios is not None or packed.scales.dim() == 1 or packed.scales.shape[1] == 1
    partials = None
    if parts > 1:
        size = (programs, 2, block_m, tiling.block_n)
        partials = torch.empty(size, dtype=torch.float32, device=values.device)
    # The weight is read in words, in planes, or as numbers where x is rounded.
    planes = x_scales is None and tiling.planes(packed, block_m)
    seen = values.dtype if x_scales is not None else torch.int16 if planes else torch.int32
    arguments = {
        **_of_weight(packed, tiling.block_k, seen),
        "ratios": packed.ratios if x_scales is None else None,
        "ratio_stride": 0 if packed.ratios is None else packed.ratios.stride(0),
        "x_scales": x_scales,
        "partials": partials,
        "arrivals": prepared.arrivals,
        "M": rows,
        # One row has any stride, and the kernel wants one that keeps rows aligned.
        "x_stride": values.stride(0) if len(values) > 1 else k,
        "x_scale_stride": 0 if x_scales is None else x_scales.stride(1),
        "residual_stride": residual.stride(0) if residual is not None and rows > 1 else n,
        "share": tiling.share,
        "PLANES": planes,
        "BLOCK_M": block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "HALVES": tiling.block_n >= 32 * tiling.warps,
        "PARTS": triton.next_power_of_2(parts),
        "ALIGNED": tiling.aligned(k),
        "WAITS": tiling.waits(k, block_m, num_sms_of(packed.words.device)),
        # The loop of wgmma becomes slower by it: 34.5 to 36 us of gate_up at 64 rows.
        "EVEN_N": planes and n % tiling.block_n == 0,
        "EVEN_K": k % tiling.block_k == 0,
        "PREFETCH": tiling.prefetch,
        "WARPS": tiling.warps,
        "num_stages": tiling.stages,
    }
    if tiling.registers is not None:
        arguments["maxnreg"] = tiling.registers
    return few_rows_kernel, (programs,), arguments


def num_sms_of(device: torch.device) -> int:
    """Multiprocessors; of what is no GPU as many as any tiling wants."""
    if device.type != "cuda":
        return tuning.MAX_PARTS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _of_weight(packed: Packed, block_k: int, seen: torch.dtype) -> dict[str, Any]:
    """The weight as a kernel reads it, its words as numbers of type `seen`."""
    words = packed.words.view(seen)
    finer = packed.words.element_size() // words.element_size()
    row_stride, block_stride = packed.strides(block_k)
    return {
        "words": words,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "ROW_STRIDE": row_stride * finer,
        "block_stride": block_stride * finer,
        "scale_stride": packed.scales.stride(0),
        "FORMAT": packed.format,
        "GROUPED": packed.group > 0,
        "BLOCKS_PER_SCALE": max(1, packed.group // block_k),
        "ROWS_PER_SCALE": packed.rows_per_scale,
    }
