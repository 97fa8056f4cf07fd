"""The Triton expert kernel in the interpreter, against float64."""

import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.interpreter import last_program_first, mend_loops
from torch import Tensor

from rackmount_moe.triton_experts import align, combine, experts, few, launches, product
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.tuning import Plan, Tiling
from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 5, 72, 40, 3
HALF = 1e-3
"""What rounding to half precision costs."""
TILING = Tiling(block_n=32, block_k=32, stages=2, warps=4)
FEW = Plan(TILING, TILING, parts=2)
BLOCKS = Plan(TILING, replace(TILING, block_n=64), block_m=16)
PLANS = {
    "few": FEW,
    "few, undivided": replace(FEW, parts=1),
    "few, more programs than blocks": replace(FEW, parts=8),
    "blocks": BLOCKS,
    "blocks, programs for several tiles": replace(
        BLOCKS, gate_up=replace(TILING, programs=3), down=replace(TILING, programs=2)
    ),
}
FORMATS = {
    "dense": {},
    "fp8_rows": {},
    "fp8_blocks": {},
    "int4_groups": {"group": 32},
    "int4_groups of rows": {"group": 1000},
    "int4_groups with zeros, in another order": {"group": 32, "zeros": True, "order": True},
    "int8_groups": {"group": 32},
    "int8_groups with zeros": {"group": 32, "zeros": True},
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels loop in the interpreter, and what nobody writes is not a number."""
    mend_loops(monkeypatch)
    torch.manual_seed(0)

    def empty(*size: object, dtype: torch.dtype, **options: object) -> Tensor:
        value = torch.nan if dtype.is_floating_point else -7
        return torch.full(*size, value, dtype=dtype, **options)

    for module in (experts, launches, align):
        monkeypatch.setattr(module.torch, "empty", empty)


def weight(name: str, parts: tuple[int, ...], columns: int) -> Weight:
    """Random, of a size that keeps products near their inputs'."""
    fmt, options = name.split()[0], FORMATS[name]
    rows, size = sum(parts), (NUM_EXPERTS, sum(parts), columns)
    if fmt == "dense":
        return Weight(fmt, {"weight": torch.randn(size) / columns**0.5}, parts, columns)
    if fmt.startswith("fp8"):
        blocks = (sum(-(-part // 128) for part in parts), -(-columns // 128))
        scales = torch.rand(NUM_EXPERTS, *((rows,) if fmt == "fp8_rows" else blocks)) + 0.5
        values = (torch.randn(size) * 50).to(torch.float8_e4m3fn)
        return Weight(fmt, {"values": values, "scales": scales / 300}, parts, columns)
    group = min(options["group"], columns)
    dims = (NUM_EXPERTS, rows, -(-columns // group))
    levels = 16 if fmt == "int4_groups" else 256
    tensors = {"scales": (torch.rand(dims) + 0.5) / levels / 2}
    if levels == 16:
        words = (NUM_EXPERTS, rows, -(-columns // 8))
        tensors["values"] = torch.randint(-(2**31), 2**31, words, dtype=torch.int32)
    else:
        tensors["values"] = torch.randint(0, 256, size, dtype=torch.uint8)
    if options.get("zeros"):
        tensors["zeros"] = torch.randint(0, levels, dims, dtype=torch.uint8)
    if options.get("order"):
        tensors["order"] = torch.stack([torch.randperm(columns) for _ in range(NUM_EXPERTS)]).int()
        tensors["order"][:, 3] = -1
    return Weight(fmt, tensors, parts, columns, group=group)


def bundle(name: str = "dense", hidden: int = HIDDEN, width: int = WIDTH) -> ExpertBundle:
    return ExpertBundle(
        gate_up=weight(name, (width, width), hidden), down=weight(name, (hidden,), width)
    )


def halved(layer: ExpertBundle) -> ExpertBundle:
    """Dense weights in half precision."""

    def half(each: Weight) -> Weight:
        return replace(each, tensors={"weight": each.tensors["weight"].half()})

    return ExpertBundle(gate_up=half(layer.gate_up), down=half(layer.down))


def tokens(count: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> ExpertInput:
    """Some choices are of other ranks, and expert 3 has no token."""
    scores = torch.rand(count, NUM_EXPERTS)
    scores[:, 3] = -1
    ids = scores.topk(TOP_K).indices.int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    x = torch.randn(count, hidden + 8).to(dtype)[:, 8:]
    return ExpertInput(x=x, expert_ids=ids, weights=torch.rand(count, TOP_K))


def defined(given: ExpertInput, layer: ExpertBundle) -> Tensor:
    """One token and one expert at a time, in float64."""
    gate_up, down = layer.gate_up.dequantize().double(), layer.down.dequantize().double()
    out = torch.zeros_like(given.x, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(given.expert_ids, given.weights, strict=True)):
        for expert, factor in zip(ids.tolist(), weights.tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ given.x[token].double()).chunk(2)
                out[token] += factor * (down[expert] @ (F.silu(gate) * up))
    return out


def run(plan: Plan, given: ExpertInput, layer: ExpertBundle, tolerance: float = 2e-6) -> Tensor:
    """The layer's output, held to float64."""
    kernel = TritonExperts(lambda *_: plan)
    prepared = kernel.prepare(layer)
    out = kernel.run(given, prepared)
    assert out.dtype == given.x.dtype
    wide = defined(given, layer)
    scale = float(wide.abs().max()) if wide.numel() else 0.0
    torch.testing.assert_close(out.double(), wide, rtol=tolerance * 10, atol=tolerance * scale)
    assert not prepared.arrivals.any()
    return out


@pytest.mark.parametrize("plan", [FEW, BLOCKS], ids=["few", "blocks"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_sum_of_each_tokens_experts(name: str, plan: Plan) -> None:
    """Inputs are rounded to half precision between the products and after them, weights never."""
    layer = bundle(name)
    run(plan, tokens(3, dtype=torch.float16), halved(layer) if name == "dense" else layer, HALF)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_plan_gives_it_for_any_number_of_tokens(plan: Plan, count: int) -> None:
    run(plan, tokens(count), bundle())


@pytest.mark.parametrize("plan", [FEW, BLOCKS], ids=["few", "blocks"])
@pytest.mark.parametrize(("hidden", "width"), [(16, 16), (50, 7), (33, 130)])
def test_sizes_need_not_fill_tiles(plan: Plan, hidden: int, width: int) -> None:
    run(plan, tokens(2, hidden), bundle("dense", hidden, width))


@pytest.mark.parametrize("name", ["fp8_blocks", "int4_groups of rows"])
def test_the_up_rows_begin_blocks_and_packed_words_of_their_own(name: str) -> None:
    run(BLOCKS, tokens(2, 144, torch.float16), bundle(name, 144, 136), HALF)


@pytest.mark.parametrize("plan", [FEW, BLOCKS], ids=["few", "blocks"])
@pytest.mark.parametrize("expert", [-1, 2])
def test_all_tokens_may_choose_one_expert_or_none(plan: Plan, expert: int) -> None:
    given = tokens(6)
    given = replace(given, expert_ids=torch.full_like(given.expert_ids, -1))
    given.expert_ids[:, 1] = expert
    out = run(plan, given, bundle())
    assert bool(out.any()) == (expert >= 0)


def test_more_tokens_than_a_block_holds_fill_several() -> None:
    given = tokens(40)
    given.expert_ids[:, 0] = 4
    run(BLOCKS, given, bundle())


@pytest.mark.parametrize("plan", [FEW, BLOCKS], ids=["few", "blocks"])
def test_programs_come_in_any_order(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, given = bundle(), tokens(3)
    forward = run(plan, given, layer)
    last_program_first(monkeypatch)
    assert torch.equal(run(plan, given, layer), forward)


@pytest.mark.parametrize("plan", [FEW, BLOCKS], ids=["few", "blocks"])
def test_a_token_gets_the_same_whatever_the_others_hold(plan: Plan) -> None:
    layer, given = bundle(), tokens(4)
    out = run(plan, given, layer)
    given.x[[0, 1, 3]] = torch.nan
    kernel = TritonExperts(lambda *_: plan)
    assert torch.equal(kernel.run(given, kernel.prepare(layer))[2], out[2])


def test_kernels_wait_before_the_next_one_may_start() -> None:
    """What the second product relies on as it reads experts before it waits."""
    for module, count in ((product, 1), (few, 1), (align, 2), (combine, 1)):
        source = inspect.getsource(module)
        assert source.count("gdc_wait()\n") == source.count("gdc_launch_dependents()\n") == count
        assert source.count("gdc_wait()\n        gdc_launch_dependents()\n") == count
