"""Grids and arguments of the kernels of one layer."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.align import Blocks
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.tuning import Plan, Tiling
from rackmount_registry.device.launch import launch_options

FEW_BLOCK_M = 16
"""Tokens that the matrix instruction takes at least; one of them is there."""
COMBINE_BLOCK = 1024

Launch = tuple[tuple[int, ...], dict[str, Any]]
"""Grid and arguments."""


@dataclass(frozen=True)
class Prepared:
    """A layer's weights, and how they are multiplied."""

    gate_up: Packed
    down: Packed
    arrivals: Tensor
    """int32, a counter for each tile and token where tokens are few: zeros between products."""
    plans: tuple[Plan, ...]
    """One for each of `tuning.BUCKETS`."""


def product_launch(
    plan: Plan,
    layer: Prepared,
    x: Tensor,
    ids: Tensor,
    blocks: Blocks | None,
    weights: Tensor | None,
    out: Tensor,
) -> Launch:
    """Of `product_kernel`: the first product of x [T, H], with the routing's weights [T, K], to out
    [T K, I]; or, without them, the second of x [T K, I] to out [T K, H]."""
    gated = weights is not None
    tiling, packed = (plan.gate_up, layer.gate_up) if gated else (plan.down, layer.down)
    tiles = triton.cdiv(out.shape[1], tiling.block_n // 2 if gated else tiling.block_n)
    programs = tiles * (ids.numel() if blocks is None else len(blocks.experts))
    if tiling.programs:
        programs = min(programs, tiling.programs * num_multiprocessors(x.device))
    assert x.stride(1) == 1
    return (programs,), {
        "x": x,
        **_weight(packed, tiling, gated),
        "experts": ids if blocks is None else blocks.experts,
        "slots": None if blocks is None else blocks.slots,
        "num_blocks": None if blocks is None else blocks.count,
        "factors": weights,
        "out": out,
        "num_slots": ids.numel(),
        "top_k": ids.shape[1] if gated else 1,
        # One row has any stride, and the kernel wants one that keeps rows aligned.
        "x_stride": x.stride(0) if len(x) > 1 else x.shape[1],
        "BLOCK_M": plan.block_m or FEW_BLOCK_M,
        "GATED": gated,
        **_options(tiling, x.device),
    }


def sum_launch(plan: Plan, layer: Prepared, act: Tensor, ids: Tensor, out: Tensor) -> Launch:
    """Of `sum_kernel`: the second product and the sum, of act [T K, I] to out [T, H]."""
    packed, tiling, tokens = layer.down, plan.down, len(out)
    assert tokens <= tuning.MAX_FEW and tiling.block_n >= tuning.MIN_BLOCK_N
    tiles = triton.cdiv(packed.rows, tiling.block_n)
    partials = None
    if plan.parts > 1:
        size = (tiles, plan.parts, tokens, tiling.block_n)
        partials = torch.empty(size, dtype=torch.float32, device=out.device)
    return (tiles * plan.parts * tokens,), {
        "x": act,
        **_weight(packed, tiling, gated=False),
        "experts": ids,
        "partials": partials,
        "arrivals": layer.arrivals,
        "out": out,
        "num_tokens": tokens,
        "top_k": ids.shape[1],
        "x_stride": act.shape[1],
        "MAX_TOP_K": triton.next_power_of_2(ids.shape[1]),
        "BLOCK_M": FEW_BLOCK_M,
        "PARTS": plan.parts,
        "PREFETCH": plan.prefetch,
        **_options(tiling, out.device),
    }


def combine_launch(results: Tensor, ids: Tensor, out: Tensor) -> Launch:
    """Of `combine_kernel`: results [T K, H] to out [T, H]."""
    block = min(COMBINE_BLOCK, triton.next_power_of_2(out.shape[1]))
    return (len(out), triton.cdiv(out.shape[1], block)), {
        "results": results,
        "experts": ids,
        "out": out,
        "top_k": ids.shape[1],
        "N": out.shape[1],
        "BLOCK_N": block,
        "num_warps": max(1, block // 256),
        **launch_options(out.device),
    }


def num_multiprocessors(device: torch.device) -> int:
    """One where there are none."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _weight(packed: Packed, tiling: Tiling, gated: bool) -> dict[str, Any]:
    """What both kernels of products are told of a weight."""
    block_k, scales = packed.block_k or tiling.block_k, packed.scales
    return {
        "weight": packed.values,
        "descriptor": _descriptor(packed, tiling, gated) if tiling.tma else None,
        "scales": scales,
        "zeros": packed.zeros,
        "order": packed.order,
        "N": packed.rows,
        "K": packed.columns,
        "groups": packed.groups,
        "scale_stride": 1 if scales is None else scales.shape[-1],
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": block_k,
        "CODE": packed.code,
        "GROUP": packed.group,
        "SCALE_BLOCKS": packed.format == "fp8_blocks",
        "EVEN": packed.columns % block_k == 0,
    }


def _options(tiling: Tiling, device: torch.device) -> dict[str, Any]:
    return {
        "COMPILED": device.type == "cuda",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        **launch_options(device),
    }


def _descriptor(packed: Packed, tiling: Tiling, gated: bool) -> TensorDescriptor:
    """Of the dense weight [E, N, K], or of gate and up rows [2 E, N / 2, K]."""
    assert packed.code == "dense"
    box = [1, tiling.block_n // 2 if gated else tiling.block_n, tiling.block_k]
    values = packed.values.view(-1, packed.rows // (1 + gated), packed.columns)
    return TensorDescriptor.from_tensor(values, box)
