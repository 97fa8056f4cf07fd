"""Experts in Triton: two products, what sorts tokens before them and what sums results after."""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.align import align
from rackmount_moe.triton_experts.combine import combine_kernel
from rackmount_moe.triton_experts.few import sum_kernel
from rackmount_moe.triton_experts.launches import (
    Prepared,
    combine_launch,
    product_launch,
    sum_launch,
)
from rackmount_moe.triton_experts.packing import Packed, pack
from rackmount_moe.triton_experts.product import product_kernel
from rackmount_moe.triton_experts.tuning import Plan
from rackmount_registry.device.ahead import AheadCompiler
from rackmount_registry.experts import ExpertBundle, ExpertInput

Choose = Callable[[Packed, Packed, int], Plan]
"""`choose(gate_up, down, bucket)`; see `tuning.choose`."""


class TritonExperts:
    """See `rackmount_registry.experts.ExpertKernel`. Weights stay packed in memory.

    Products are of weights as they are stored, exactly, and of inputs in the dtype of x, however
    the scheme would round those. A routing weight is applied between the two products, to what is
    rounded there anyway; results of a token's experts are rounded and added in float32, in the
    order of its choices, or added first where tokens are few.

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
        size = tuning.MAX_FEW * triton.cdiv(down.rows, tuning.MIN_BLOCK_N)
        arrivals = torch.zeros(size, dtype=torch.int32, device=down.values.device)
        plans = tuple(self.choose(gate_up, down, bucket) for bucket in tuning.BUCKETS)
        return Prepared(gate_up, down, arrivals, plans)

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
        blocks = None
        if plan.block_m:
            blocks = align(ids, len(prepared.gate_up.values), plan.block_m)
        grid, arguments = product_launch(plan, prepared, x, ids, blocks, weights, act)
        product_kernel[grid](**arguments)
        if blocks is None:
            grid, arguments = sum_launch(plan, prepared, act, ids, out)
            sum_kernel[grid](**arguments)
            return out
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
        device, hidden, width = layer.arrivals.device, layer.down.rows, layer.gate_up.rows // 2

        def new(rows: int, columns: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros((rows, columns), dtype=dtype, device=device)

        x, act = new(2, hidden), new(2 * top_k, width)
        out, results = new(2, hidden), new(2 * top_k, hidden)
        ids, weights = new(2, top_k, torch.int32), new(2, top_k, torch.float32)
        for plan in set(layer.plans):
            gate_up = replace(plan.gate_up, programs=0)
            down = replace(plan.down, programs=0)
            blocks = align(ids, len(layer.gate_up.values), plan.block_m) if plan.block_m else None
            _, arguments = product_launch(plan, layer, x, ids, blocks, weights, act)
            self._ahead.start(product_kernel, (like, plan.block_m, gate_up, "gate_up"), arguments)
            if blocks is None:
                _, arguments = sum_launch(plan, layer, act, ids, out)
                key = (like, down, plan.parts, plan.prefetch)
                self._ahead.start(sum_kernel, key, arguments)
            else:
                _, arguments = product_launch(plan, layer, act, ids, blocks, None, results)
                self._ahead.start(product_kernel, (like, plan.block_m, down, "down"), arguments)
        self._ahead.wait()
