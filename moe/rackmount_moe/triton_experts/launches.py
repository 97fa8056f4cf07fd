"""What one layer launches: kernels with their grids and arguments."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rackmount_moe.triton_experts.align import Blocks, Launch, align_launches
from rackmount_moe.triton_experts.combine import combine_kernel
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.product import product_kernel
from rackmount_moe.triton_experts.table import Plan, Tiling
from rackmount_moe.triton_experts.vector import vector_kernel
from rackmount_registry.device.launch import launch_options

COMBINE_BLOCK = 1024
LARGE_BLOCK_M = 128
"""From here on blocks of tokens that are less than half full are worth kernels of their own."""


@dataclass(frozen=True)
class Prepared:
    """A layer's weights, and how they are multiplied."""

    gate_up: Packed
    down: Packed
    plans: tuple[Plan, ...]
    """One for each of `table.BUCKETS`; none where they are searched for."""


def layer_launches(
    plan: Plan, layer: Prepared, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor
) -> Iterator[Launch]:
    """Of a layer from tokens x [T, H], T > 0, with their experts ids int32 [T, K] and weights
    [T, K], to out [T, H]; what lies between is taken as it is needed."""

    def new(columns: int) -> Tensor:
        return torch.empty((ids.numel(), columns), dtype=x.dtype, device=x.device)

    act = new(layer.gate_up.rows // 2)
    if not plan.block_m:
        yield vector_launch(plan, layer, x, ids, weights, act)
        yield vector_launch(plan, layer, act, ids, None, out)
        return
    blocks, aligning = align_launches(ids, len(layer.gate_up.values), plan.block_m)
    yield from aligning
    yield product_launch(plan, layer, x, ids, blocks, weights, act)
    results = new(layer.down.rows)
    yield product_launch(plan, layer, act, ids, blocks, None, results)
    yield combine_launch(results, ids, out)


def product_launch(
    plan: Plan,
    layer: Prepared,
    x: Tensor,
    ids: Tensor,
    blocks: Blocks,
    weights: Tensor | None,
    out: Tensor,
) -> Launch:
    """The first product of x [T, H], with the routing's weights [T, K], to out
    [T K, I]; or, without them, the second of x [T K, I] to out [T K, H]."""
    gated = weights is not None
    tiling, packed = (plan.gate_up, layer.gate_up) if gated else (plan.down, layer.down)
    programs = triton.cdiv(packed.rows, tiling.block_n) * len(blocks.experts)
    if tiling.programs:
        programs = min(programs, tiling.programs * num_multiprocessors(x.device))
    bound = {"maxnreg": tiling.registers} if tiling.registers else {}
    return (
        product_kernel,
        (programs,),
        {
            **_arguments(packed, tiling, x, ids, weights, out),
            "descriptor": _descriptor(packed, tiling, gated) if tiling.tma else None,
            "experts": blocks.experts,
            "slots": blocks.slots,
            "num_blocks": blocks.count,
            "num_slots": ids.numel(),
            "BLOCK_M": plan.block_m,
            "BLOCK_K": packed.block_k or tiling.block_k,
            "HALVES": plan.block_m >= LARGE_BLOCK_M,
            "ONCE": not tiling.programs,
            "num_stages": tiling.stages,
            **bound,
        },
    )


def vector_launch(
    plan: Plan, layer: Prepared, x: Tensor, ids: Tensor, weights: Tensor | None, out: Tensor
) -> Launch:
    """The first product, as `product_launch` says; or, without the weights, the
    second and the sum, of x [T K, I] to out [T, H]."""
    gated = weights is not None
    tiling, packed = (plan.gate_up, layer.gate_up) if gated else (plan.down, layer.down)
    choices = 1 if gated else ids.shape[1]
    block_k, blocks, inner, steps = vector_cut(packed, tiling, choices)
    tiles = triton.cdiv(packed.rows, tiling.block_n)
    following = layer.down.values
    return (
        vector_kernel,
        (tiles * len(out),),
        {
            "following": following if gated else None,
            "num_rows": len(out),
            "num_choices": choices,
            "following_size": following[0].numel(),
            "INNER": inner,
            "STEPS": steps if steps <= tiling.stages else 0,
            "BLOCK_K": block_k,
            "BLOCKS": blocks,
            "PREFETCH": plan.prefetch if gated else 0,
            "CONVERTS": converts_fp8(x.device),
            **_arguments(packed, tiling, x, ids, weights, out),
            "experts": ids,
        },
    )


def vector_cut(packed: Packed, tiling: Tiling, choices: int) -> tuple[int, int, int, int]:
    """Columns of a block, blocks of a weight, blocks that are read at a time, and steps until those
    of all `choices` are."""
    block_k = packed.block_k or tiling.block_k
    blocks = triton.cdiv(packed.columns, block_k)
    inner = triton.next_power_of_2(choices) * max(1, tiling.block_k // block_k)
    return block_k, blocks, inner, triton.cdiv(choices * blocks, inner)


def combine_launch(results: Tensor, ids: Tensor, out: Tensor) -> Launch:
    """Results [T K, H] to out [T, H]."""
    block = min(COMBINE_BLOCK, triton.next_power_of_2(out.shape[1]))
    return (
        combine_kernel,
        (len(out), triton.cdiv(out.shape[1], block)),
        {
            "results": results,
            "experts": ids,
            "out": out,
            "top_k": ids.shape[1],
            "N": out.shape[1],
            "BLOCK_N": block,
            "num_warps": max(1, block // 256),
            **launch_options(out.device),
        },
    )


def converts_fp8(device: torch.device) -> bool:
    """Whether it has an instruction that widens FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def num_multiprocessors(device: torch.device) -> int:
    """One where there are none."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _arguments(
    packed: Packed, tiling: Tiling, x: Tensor, ids: Tensor, weights: Tensor | None, out: Tensor
) -> dict[str, Any]:
    """What both kernels of products are told."""
    block_k, scales, gated = packed.block_k or tiling.block_k, packed.scales, weights is not None
    assert x.stride(1) == 1
    return {
        "x": x,
        "weight": packed.values,
        "scales": scales,
        "zeros": packed.zeros,
        "order": packed.order,
        "factors": weights,
        "out": out,
        "share": ids.shape[1] if gated else 1,
        "N": packed.rows,
        "K": packed.columns,
        # One row has any stride, and the kernel wants one that keeps rows aligned.
        "x_stride": x.stride(0) if len(x) > 1 else x.shape[1],
        "groups": packed.groups,
        "scale_rows": 1 if scales is None else scales.shape[1],
        "BLOCK_N": tiling.block_n,
        "CODE": packed.code,
        "GROUP": packed.group,
        "SCALE_BLOCKS": packed.format == "fp8_blocks",
        "GATED": gated,
        "EVEN": packed.columns % block_k == 0,
        "COMPILED": x.device.type == "cuda",
        "num_warps": tiling.warps,
        **launch_options(x.device),
    }


def _descriptor(packed: Packed, tiling: Tiling, gated: bool) -> TensorDescriptor:
    """Of the dense weight [E, N, K], or of gate and up rows [2 E, N / 2, K]."""
    assert packed.code == "dense"
    box = [1, tiling.block_n // 2 if gated else tiling.block_n, tiling.block_k]
    values = packed.values.view(-1, packed.rows // (1 + gated), packed.columns)
    return TensorDescriptor.from_tensor(values, box)
