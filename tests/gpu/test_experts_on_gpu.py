"""The Triton expert kernel, compiled: against float64, in every format and plan."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given as given_any
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.experts import (
    CHOICES,
    FORMATS,
    defined_experts,
    expert_bundle,
    expert_choices,
    expert_tokens,
)
from torch import Tensor

from rackmount_moe.triton_experts import align, experts, launches
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.launches import Prepared
from rackmount_moe.triton_experts.table import BUCKETS, MAX_FEW, Plan, Tiling
from rackmount_moe.triton_experts.tuning import shipped
from rackmount_registry.experts import ExpertBundle, ExpertInput, ExpertUse

pytestmark = pytest.mark.gpu

ROUNDING = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Error relative to the norm."""
ROW_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The same of each token, three times what rounding was seen to cost one of thousands."""
LEAST = 1e-5
"""More of each token: its weights may be so small that float16 has few bits left for them."""
FLAT = Tiling(block_n=64, block_k=64, stages=4, warps=4)
WIDE = Tiling(block_n=128, block_k=64, stages=3, warps=8)
PLANS = {
    "few": Plan(Tiling(16, 256, 2, 4), Tiling(8, 128, 2, 4), prefetch=64),
    "few, small tiles": Plan(Tiling(4, 512, 2, 2), Tiling(4, 128, 2, 8)),
    "few, large tiles": Plan(Tiling(32, 128, 2, 4), Tiling(16, 256, 2, 8), prefetch=256),
    "blocks of 16": Plan(FLAT, FLAT, block_m=16),
    "blocks of 32, programs for several tiles": Plan(
        replace(FLAT, programs=2), replace(WIDE, programs=1), block_m=32
    ),
    "blocks of 64": Plan(WIDE, FLAT, block_m=64),
    "blocks of 128": Plan(replace(WIDE, block_n=256), WIDE, block_m=128),
}
TMA = {
    "blocks of 16, by TMA": Plan(replace(WIDE, tma=True), replace(FLAT, tma=True), block_m=16),
    "blocks of 128, by TMA": Plan(replace(WIDE, tma=True), replace(WIDE, tma=True), block_m=128),
}

SHIPPED = shipped("NVIDIA H200").shapes
"""The table that comes along: shape -> bucket -> plan."""


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is not a number, or no slot."""
    torch.manual_seed(0)

    def empty(*size: object, dtype: torch.dtype, **options: object) -> Tensor:
        value = torch.nan if dtype.is_floating_point else 1 << 30
        return torch.full(*size, value, dtype=dtype, **options)

    for module in (experts, launches, align):
        monkeypatch.setattr(module.torch, "empty", empty)


def on_gpu(given: ExpertInput) -> ExpertInput:
    return ExpertInput(
        x=given.x.cuda(), expert_ids=given.expert_ids.cuda(), weights=given.weights.cuda()
    )


def on_cuda(layer: ExpertBundle) -> ExpertBundle:
    moved = (
        replace(each, tensors={name: tensor.cuda() for name, tensor in each.tensors.items()})
        for each in (layer.gate_up, layer.down)
    )
    return ExpertBundle(gate_up=next(moved), down=next(moved))


def prepare(layer: ExpertBundle, plan: Plan | None) -> Prepared:
    """With a plan for any number of tokens, or as `choose` says."""
    kernel = TritonExperts(lambda *_: plan) if plan is not None else TritonExperts()
    return kernel.prepare(on_cuda(layer))


def check(
    prepared: Prepared, layer: ExpertBundle, count: int, dtype: torch.dtype, top_k: int = 4
) -> None:
    hidden, num_experts = layer.down.out_features, len(layer.down.dequantize())
    hold(prepared, layer, expert_tokens(count, num_experts, hidden, top_k, dtype))


def hold(prepared: Prepared, layer: ExpertBundle, given: ExpertInput) -> None:
    """To float64, where `layer` and `given` lie: as a whole, in which a wrong number would be lost,
    and token by token, in which it is not."""
    dtype = given.x.dtype
    out = TritonExperts().run(on_gpu(given), prepared)
    wide = defined_experts(given, layer)
    assert out.dtype == dtype
    error = out.to(wide.device).double() - wide
    assert error.norm() <= ROUNDING[dtype] * wide.norm()
    assert (error.norm(dim=-1) <= ROW_ROUNDING[dtype] * wide.norm(dim=-1) + LEAST).all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan_gives_the_sum_of_each_tokens_experts(plan: Plan, dtype: torch.dtype) -> None:
    layer = expert_bundle("dense", 9, 320, 136, dtype)
    prepared = prepare(layer, plan)
    for count in (1, 33, 300) if plan.block_m else (0, 1, 5, MAX_FEW):
        check(prepared, layer, count, dtype)


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        (PLANS["few"], torch.bfloat16),
        (PLANS["few"], torch.float16),
        (PLANS["blocks of 16"], torch.bfloat16),
        (PLANS["blocks of 64"], torch.bfloat16),
    ],
    ids=["few", "few, float16", "blocks of 16", "blocks of 64"],
)
@pytest.mark.parametrize("name", list(FORMATS)[1:])
def test_every_format_gives_it(name: str, plan: Plan, dtype: torch.dtype) -> None:
    layer = expert_bundle(name, 9, 320, 136)
    prepared = prepare(layer, plan)
    for count in (1, 33, 300) if plan.block_m else (0, 1, 5, MAX_FEW):
        check(prepared, layer, count, dtype)
    for top_k in (1, 2, 3, 8):  # programs of few tokens are cut by it
        check(prepared, layer, 5, dtype, top_k)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=7, deadline=None)
@given_any(
    plan=st.sampled_from(list(PLANS)),
    dtype=st.sampled_from(list(ROUNDING)),
    top_k=st.integers(1, 9),
    loads=st.lists(
        st.tuples(st.sampled_from(CHOICES), st.integers(0, 300)), min_size=4, max_size=12
    ),
    seed=st.integers(0, 10**6),
)
def test_any_tokens_and_choices_give_the_sum(
    name: str,
    plan: str,
    dtype: torch.dtype,
    top_k: int,
    loads: list[tuple[str, int]],
    seed: int,
) -> None:
    """Kernels take seconds to compile: there are few examples of them, each with several loads."""
    torch.manual_seed(seed)
    layer = expert_bundle(name, 9, 320, 136, dtype)
    prepared = prepare(layer, PLANS[plan])
    for choices, number in loads:
        count = number if PLANS[plan].block_m else number % (MAX_FEW + 1)
        hold(prepared, layer, expert_choices(choices, count, 9, 320, top_k, dtype))


@pytest.mark.parametrize("plan", TMA.values(), ids=TMA)
def test_tma_reads_the_same_weights(plan: Plan) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor memory accelerator")
    layer = expert_bundle("dense", 9, 320, 136, torch.bfloat16)
    for count in (1, 33, 300):
        check(prepare(layer, plan), layer, count, torch.bfloat16)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("hidden", "width"), [(16, 16), (50, 7), (130, 200)])
def test_sizes_need_not_fill_tiles(plan: Plan, hidden: int, width: int) -> None:
    layer = expert_bundle("dense", 5, hidden, width, torch.bfloat16)
    for count in (1, 7):
        check(prepare(layer, plan), layer, count, torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
def test_the_chosen_plans_give_the_sum(name: str) -> None:
    layer = expert_bundle(name, 16, 256, 128, torch.bfloat16)
    prepared = prepare(layer, None)
    for count in (1, 2, 3, 7, 8, 9, 17, 64, 256, 1000):
        check(prepared, layer, count, torch.bfloat16)
        check(prepared, layer, count, torch.bfloat16, top_k=2)


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [(shape, bucket) for shape, row in SHIPPED.items() for bucket in row],
)
def test_the_plans_that_come_along_give_the_sum(
    shape: str, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the sizes that they were measured at, of fewer experts."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("plans for another GPU")
    monkeypatch.setitem(FORMATS, "int4_groups", {"group": 128})  # as they were measured
    name, sizes = shape.split()
    _, hidden, width = map(int, sizes.split("x"))
    layer = on_cuda(expert_bundle(name, 16, hidden, width, torch.bfloat16))
    prepared = prepare(layer, SHIPPED[shape][bucket])
    for count in (bucket - bucket // 3, bucket):
        given = expert_choices("any", count, 16, hidden, 8, torch.bfloat16)
        hold(prepared, layer, on_gpu(given))


@pytest.mark.parametrize("count", [1, MAX_FEW, 100, 3000])
def test_a_chain_in_a_graph_gives_the_same_bits_each_time(count: int) -> None:
    """Each layer reads the one before, which may still be running as its kernels start."""
    layers = [
        prepare(expert_bundle("dense", 16, 256, 128, torch.bfloat16), plan)
        for plan in (*([PLANS["few"]] * 3 if count <= MAX_FEW else ()), None, None, None)
    ]
    kernel, given = TritonExperts(), on_gpu(expert_tokens(count, 16, 256, 4, torch.bfloat16))

    def run() -> list[Tensor]:
        outs = [given.x.contiguous()]
        for layer in layers:
            outs.append(outs[0] + kernel.run(replace(given, x=outs[-1]), layer))
        return outs

    wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(100):
        graph.replay()
        assert all(map(torch.equal, outs, wanted))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_token_gets_the_same_whatever_the_others_hold(plan: Plan) -> None:
    prepared = prepare(expert_bundle("dense", 9, 320, 136, torch.bfloat16), plan)
    kernel, given = TritonExperts(), on_gpu(expert_tokens(9, 9, 320, 4, torch.bfloat16))
    out = kernel.run(given, prepared)
    given.x[:4], given.x[5:] = torch.nan, torch.inf
    assert torch.equal(kernel.run(given, prepared)[4], out[4])


def num_compiled() -> int:
    """Kernels of experts in this process."""
    kernels = (
        *(align.count_kernel, align.place_kernel, launches.combine_kernel),
        *(launches.product_kernel, launches.vector_kernel),
    )
    return sum(len(each[0]) for kernel in kernels for each in kernel.device_caches.values())


def test_nothing_is_compiled_after_the_first_run() -> None:
    layer = expert_bundle("dense", 5, 64, 48, torch.bfloat16)
    kernel = TritonExperts()
    prepared = kernel.prepare(on_cuda(layer), ExpertUse(top_k=2, dtype=torch.bfloat16))

    def run(count: int) -> None:
        given = on_gpu(expert_tokens(count, 5, 64, 2, torch.bfloat16))
        kernel.run(replace(given, x=given.x.contiguous()), prepared)

    run(1)
    known = num_compiled()
    for count in (*range(2, 70), *BUCKETS[7:13]):
        run(count)
    assert num_compiled() == known
