"""Dense weights, by the Triton kernel where few rows are multiplied, by cuBLAS elsewhere."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rackmount_backends.triton_linear import tuning
from rackmount_backends.triton_linear.kernel import linear_kernel
from rackmount_backends.triton_linear.tuning import Tiling
from rackmount_backends.triton_ops.activation import silu_mul
from rackmount_registry.device.ahead import AheadCompiler, traits
from rackmount_registry.device.launch import launch_options
from rackmount_registry.formats import EPILOGUES, Weight

SIZES = ("N", "K", "x_stride", "residual_stride")
"""Arguments of which a compiled kernel knows no more than whether they are multiples of 16."""

Choose = Callable[[Tensor, str, int], Tiling | None]
"""`choose(weight, epilogue, bucket)`; see `tuning.choose`."""


@dataclass(frozen=True)
class Prepared:
    """A weight, and how its products are made."""

    weight: Tensor
    """[N, K]: the tensor that was loaded."""
    arrivals: Tensor
    """int32, a counter for each tile: zeros between products."""
    tilings: dict[str, tuple[Tiling | None, ...]]
    """Epilogue -> one for each of `tuning.BUCKETS`; None where cuBLAS makes the product."""

    def tiling(self, epilogue: str, rows: int) -> Tiling | None:
        if not 0 < rows <= tuning.MAX_ROWS:
            return None
        return self.tilings[epilogue][tuning.bucket_of(rows)]


class TritonLinear:
    """y = x W^T for a dense 16-bit weight, at memory speed where x has few rows."""

    def __init__(self, choose: Choose = tuning.choose) -> None:
        self.choose = choose
        self._ahead = AheadCompiler()

    def prepare(
        self, weight: Weight, uses: Collection[str] = (), *, bias: bool = False
    ) -> Prepared:
        """The weight itself, with a tiling for every number of rows; kernels for `uses` begin to be
        compiled."""
        dense = weight.tensors["weight"]
        num_tiles = triton.cdiv(dense.shape[0], tuning.MIN_BLOCK_N)
        arrivals = torch.zeros(num_tiles, dtype=torch.int32, device=dense.device)
        tilings = {
            epilogue: tuple(self.choose(dense, epilogue, bucket) for bucket in tuning.BUCKETS)
            for epilogue in ("none", *EPILOGUES)
        }
        prepared = Prepared(dense, arrivals, tilings)
        for use in uses:
            self._compile(prepared, "none" if use == "run" else use, bias)
        return prepared

    def _compile(self, prepared: Prepared, epilogue: str, has_bias: bool) -> None:
        """Kernels for any number of rows."""
        weight = prepared.weight
        bias = weight.new_empty(len(weight)) if has_bias else None
        if epilogue == "silu_mul":  # on what cuBLAS makes
            silu_mul.prepare(*weight.new_empty(1, len(weight)).chunk(2, -1))
        for rows, tiling in zip(tuning.BUCKETS, prepared.tilings[epilogue], strict=True):
            if tiling is None:
                continue
            silu = epilogue == "silu_mul"
            x = weight.new_empty(rows, weight.shape[1])
            out = weight.new_empty(rows, len(weight) // 2 if silu else len(weight))
            residual = out if epilogue == "add" else None
            _, arguments = plan(tiling, x, prepared, bias, residual, out, silu)
            aligned = {name: arguments[name] % 16 == 0 for name in SIZES}
            key = traits(linear_kernel, arguments | aligned)
            self._ahead.start(linear_kernel, key, arguments)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        tiling = prepared.tiling("none", len(x))
        if tiling is None:
            return F.linear(x, prepared.weight, bias)
        return self._launch(tiling, x, prepared, bias)

    def run_silu_mul(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of the product's halves: x [T, in] -> [T, out / 2]."""
        tiling = prepared.tiling("silu_mul", len(x))
        if tiling is None:
            gate, up = F.linear(x, prepared.weight, bias).chunk(2, -1)
            return silu_mul(gate, up)
        return self._launch(tiling, x, prepared, bias, silu=True)

    def adds(self, prepared: Prepared, num_rows: int) -> bool:
        """Where the kernel makes the product: cuBLAS would copy the residual first."""
        return prepared.tiling("add", num_rows) is not None

    def run_add(
        self, x: Tensor, prepared: Prepared, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """The product plus residual [T, out] -> [T, out]."""
        tiling = prepared.tiling("add", len(x))
        if tiling is not None:
            return self._launch(tiling, x, prepared, bias, residual=residual)
        if bias is None:
            return torch.addmm(residual, x, prepared.weight.t())
        return F.linear(x, prepared.weight, bias) + residual

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
        """The product of x [T, K], 0 < T <= MAX_ROWS; rows of x and of the residual may lie
        apart."""
        self._ahead.wait()
        n = len(prepared.weight)
        out = torch.empty((len(x), n // 2 if silu else n), dtype=x.dtype, device=x.device)
        grid, arguments = plan(tiling, x, prepared, bias, residual, out, silu)
        linear_kernel[grid](**arguments)
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
    """Grid and arguments of `linear_kernel`."""
    rows, (n, k) = len(x), prepared.weight.shape
    assert x.stride(1) == 1 and x.shape[1] == k and prepared.weight.is_contiguous()
    assert x.dtype == prepared.weight.dtype and not (silu and n % 2)
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    block_m = tuning.block_m(tuning.BUCKETS[tuning.bucket_of(rows)])
    num_tiles = triton.cdiv(n, tiling.block_n)
    programs = triton.cdiv(num_tiles * triton.cdiv(k, tiling.block_k), tiling.share)
    parts = tiling.parts(k)
    assert parts <= tuning.MAX_PARTS
    partials = None
    if parts > 1:
        size = (programs, 2, block_m, tiling.block_n)
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    arguments = {
        "x": x,
        "weight": prepared.weight,
        "descriptor": _descriptor(tiling, prepared.weight, silu) if tiling.tma else None,
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
        "PARTS": triton.next_power_of_2(parts),
        "ALIGNED": tiling.aligned(k),
        "EVEN_K": k % tiling.block_k == 0,
        "SILU_MUL": silu,
        "PREFETCH": tiling.prefetch,
        "COMPILED": x.device.type == "cuda",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    return (programs,), arguments | launch_options(x.device)


def _descriptor(tiling: Tiling, weight: Tensor, silu: bool) -> TensorDescriptor:
    if not silu:
        return TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k])
    n, k = weight.shape
    block = [2, tiling.block_n // 2, tiling.block_k]
    return TensorDescriptor(weight, [2, n // 2, k], [n // 2 * k, k, 1], block)
