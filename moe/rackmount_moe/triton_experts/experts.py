"""Experts in Triton: two products, what sorts tokens before them and what sums results after."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.align import align
from rackmount_moe.triton_experts.combine import combine_kernel
from rackmount_moe.triton_experts.launches import (
    Prepared,
    combine_launch,
    product_launch,
    vector_launch,
)
from rackmount_moe.triton_experts.packing import Packed, pack
from rackmount_moe.triton_experts.product import product_kernel
from rackmount_moe.triton_experts.tuning import Plan
from rackmount_moe.triton_experts.vector import vector_kernel
from rackmount_registry.device.ahead import AheadCompiler
from rackmount_registry.experts import ExpertBundle, ExpertInput

Choose = Callable[[Packed, Packed, int], Plan]
"""`choose(gate_up, down, bucket)`; see `tuning.choose`."""


class TritonExperts:
    """See `rackmount_registry.experts.ExpertKernel`. Weights stay packed in memory.

    Products are of weights as they are stored, exactly, and of inputs in the dtype of x, however
    the scheme would round those. A routing weight is applied between the two products, to what is
    rounded there anyway; results of a token's experts are rounded and added in float32, in the
    order of its choices, or added before they are rounded where tokens are few.

    The first run compiles the kernels for any number of tokens, side by side.
    """

    def __init__(self, choose: Choose = tuning.choose) -> None:
        self.choose = choose
        self._ahead = AheadCompiler()
        self._known: set[tuple[int, torch.dtype, int]] = set()
        self._compiled: set[tuple] = set()

    def prepare(self, bundle: ExpertBundle) -> Prepared:
        """Quantized weights repacked, dense ones as they are.

        Raises:
            ConfigError: groups of a quantized weight that the kernels cannot take.
        """
        gate_up, down = pack(bundle.gate_up), pack(bundle.down)
        plans = tuple(self.choose(gate_up, down, bucket) for bucket in tuning.BUCKETS)
        return Prepared(gate_up, down, plans)

    def run(self, given: ExpertInput, prepared: Prepared) -> Tensor:
        """[T, H] in the dtype of x."""
        x, ids, weights = given.x, given.expert_ids.int(), given.weights
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        if x.is_cuda and (known := (id(prepared), x.dtype, ids.shape[1])) not in self._known:
            self._known.add(known)
            self._compile(prepared, x.dtype, ids.shape[1])
        plan = prepared.plans[tuning.bucket_of(len(x))]
        width = prepared.gate_up.rows // 2
        act = torch.empty((ids.numel(), width), dtype=x.dtype, device=x.device)
        if not plan.block_m:
            grid, arguments = vector_launch(plan, prepared, x, ids, weights, act)
            vector_kernel[grid](**arguments)
            grid, arguments = vector_launch(plan, prepared, act, ids, None, out)
            vector_kernel[grid](**arguments)
            return out
        blocks = align(ids, len(prepared.gate_up.values), plan.block_m)
        grid, arguments = product_launch(plan, prepared, x, ids, blocks, weights, act)
        product_kernel[grid](**arguments)
        results = torch.empty((ids.numel(), out.shape[1]), dtype=x.dtype, device=x.device)
        grid, arguments = product_launch(plan, prepared, act, ids, blocks, None, results)
        product_kernel[grid](**arguments)
        grid, arguments = combine_launch(results, ids, out)
        combine_kernel[grid](**arguments)
        return out

    def _compile(self, layer: Prepared, dtype: torch.dtype, top_k: int) -> None:
        """The products of all of a layer's plans, unless those of one like it were compiled."""
        like = (layer.gate_up.format, layer.gate_up.values.shape, layer.plans, dtype, top_k)
        if like in self._compiled:
            return
        self._compiled.add(like)
        device, hidden, width = layer.down.values.device, layer.down.rows, layer.gate_up.rows // 2

        def new(rows: int, columns: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros((rows, columns), dtype=dtype, device=device)

        x, act = new(2, hidden), new(2 * top_k, width)
        out, results = new(2, hidden), new(2 * top_k, hidden)
        ids, weights = new(2, top_k, torch.int32), new(2, top_k, torch.float32)
        for plan in set(layer.plans):
            if plan.block_m:
                blocks = align(ids, len(layer.gate_up.values), plan.block_m)
                kernel = product_kernel
                first = product_launch(plan, layer, x, ids, blocks, weights, act)
                second = product_launch(plan, layer, act, ids, blocks, None, results)
            else:
                kernel = vector_kernel
                first = vector_launch(plan, layer, x, ids, weights, act)
                second = vector_launch(plan, layer, act, ids, None, out)
            for name, (_, arguments) in (("gate_up", first), ("down", second)):
                tiling = replace(getattr(plan, name), programs=0)
                key = (like, plan.block_m, plan.prefetch, name, tiling)
                self._ahead.start(kernel, key, arguments)
        self._ahead.wait()
