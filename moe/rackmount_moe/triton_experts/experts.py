"""Experts in Triton: two products, what sorts tokens before them and what sums results after."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rackmount_moe.options import TritonExpertsOptions
from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.align import SEGMENTS, segments_of
from rackmount_moe.triton_experts.launches import Prepared, layer_launches
from rackmount_moe.triton_experts.packing import Packed, pack
from rackmount_moe.triton_experts.table import BUCKETS, Plan
from rackmount_moe.triton_experts.tune import tune
from rackmount_registry.device.ahead import AheadCompiler, traits
from rackmount_registry.experts import ExpertBundle, ExpertInput, ExpertUse

Choose = Callable[[Packed, Packed, int], Plan]
"""`choose(gate_up, down, bucket)`; see `tuning.choose`."""


class TritonExperts:
    """See `rackmount_registry.experts.ExpertKernel`. Weights stay packed in memory.

    Products are of weights as they are stored, up to the rounding of float32 sums (few tokens meet
    values that are up to 128 larger), and of inputs in the dtype of x, however the scheme
    would round those. A routing weight is applied between the two products, to what is
    rounded there anyway; results of a token's experts are rounded and added in float32, in the
    order of its choices, or added before they are rounded where tokens are few.
    """

    def __init__(
        self,
        choose: Choose | None = None,
        *,
        options: TritonExpertsOptions = TritonExpertsOptions(),  # noqa: B008  # frozen
    ) -> None:
        self.choose = choose or partial(tuning.choose, own=options.table())
        self._ahead = AheadCompiler()

    def prepare(self, bundle: ExpertBundle, use: ExpertUse | None = None) -> Prepared:
        """Quantized weights repacked, dense ones as they are; kernels for `use` begin to be
        compiled.

        Raises:
            ConfigError: groups of a quantized weight that the kernels cannot take.
        """
        gate_up, down = pack(bundle.gate_up), pack(bundle.down)
        plans = tuple(self.choose(gate_up, down, bucket) for bucket in BUCKETS)
        prepared = Prepared(gate_up, down, plans)
        if use is not None:
            self._compile(prepared, use)
        return prepared

    def _compile(self, layer: Prepared, use: ExpertUse) -> None:
        """All that `run` launches, at any number of tokens. More of them than fill two segments
        would take memory for the same kernels."""
        begun, most = set(), SEGMENTS[-1] // use.top_k + 1
        for bucket, plan in zip(BUCKETS, layer.plans, strict=True):
            # Between them slots are cut into segments in one of these ways.
            for num_tokens in (min(bucket // 2 + 1, most), min(bucket, most)):
                segments, size = segments_of(num_tokens * use.top_k)
                if (way := (plan, segments > 1, size)) in begun:
                    continue
                begun.add(way)
                x = layer.down.values.new_empty((num_tokens, layer.down.rows), dtype=use.dtype)
                ids = x.new_empty((num_tokens, use.top_k), dtype=torch.int32)
                weights = torch.empty_like(ids, dtype=torch.float32)
                for kernel, _, arguments in layer_launches(
                    plan, layer, x, ids, weights, torch.empty_like(x)
                ):
                    self._ahead.start(kernel, traits(kernel, arguments), arguments)

    def tune(
        self,
        bundles: Sequence[ExpertBundle],
        inputs: Mapping[int, Sequence[ExpertInput]],
        file: Path,
        *,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """See `rackmount_registry.experts.TunableExperts`."""
        layers = [Prepared(pack(each.gate_up), pack(each.down), ()) for each in bundles]
        tune(layers, inputs, file, seconds, say)

    def run(self, given: ExpertInput, prepared: Prepared) -> Tensor:
        """[T, H] in the dtype of x."""
        x, ids = given.x, given.expert_ids.int()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        self._ahead.wait()
        plan = prepared.plans[tuning.bucket_of(len(x))]
        for kernel, grid, arguments in layer_launches(plan, prepared, x, ids, given.weights, out):
            kernel[grid](**arguments)
        return out
