"""The router in Triton, compiled: against its definition, and many of it in one graph."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import greedy, rows, tiny_engine
from tests.helpers.routing import ROUTINGS, all_by_hand, fresh_state, random_bias, routers
from torch import Tensor

from rackmount_backends.triton_ops.op_set import TRITON_OPS
from rackmount_moe.triton_router.router import (
    FEW_TOKENS,
    Gate,
    gate,
    gate_kernel,
    norm_gate,
    route_kernel,
)
from rackmount_registry import ops
from rackmount_registry.experts import RouterState, Routing
from rackmount_registry.ops import NORM_GATE_TOKENS

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_TOKENS = (0, 1, 2, 7, 8, 9, 16, 17, 64, FEW_TOKENS, FEW_TOKENS + 1, 1000)
MODELS: dict[str, tuple[int, int, Routing, bool]] = {
    "qwen3-30b-a3b": (128, 2048, Routing(top_k=8), False),
    "mixtral": (8, 4096, Routing(top_k=2), False),
    "qwen2-moe": (60, 2048, Routing(top_k=4, renormalize=False), False),
    "deepseek-v2": (
        160,
        5120,
        Routing(
            top_k=6,
            renormalize=False,
            num_groups=8,
            top_groups=3,
            scaling=16.0,
            float32_logits=True,
        ),
        False,
    ),
    "deepseek-v3": (
        256,
        7168,
        Routing(
            top_k=8,
            scoring="sigmoid",
            num_groups=8,
            top_groups=4,
            group_score="top2_sum",
            scaling=2.5,
            float32_logits=True,
        ),
        True,
    ),
    **{name: (count, 100, routing, biased) for name, (count, routing, biased) in ROUTINGS.items()},
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def signs(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """-1, 0 and 1: sums of their products are exact in every dtype, and often equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(3, shape, generator=generator) - 1).to("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_the_router_equals_its_definition(model: str, dtype: torch.dtype) -> None:
    count, hidden, routing, biased = MODELS[model]
    bias = random_bias(count).cuda() if biased else None
    weight = signs(count, hidden, seed=1, dtype=dtype) / 32
    state, plain = fresh_state(count, "cuda"), fresh_state(count, "cuda")
    for num_tokens in NUM_TOKENS:
        x = signs(num_tokens, hidden, seed=num_tokens, dtype=dtype)
        slots = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
        slots[1::3] = -1
        ids, weights = gate(x, weight, routing, bias, slots, state)
        expected, exact = ops.gate(x, weight, routing, bias, slots, plain)
        assert torch.equal(ids, expected), num_tokens
        kept = slots >= 0
        torch.testing.assert_close(weights[kept], exact[kept], rtol=1e-5, atol=1e-30)
        assert torch.equal(state.load, plain.load)
        assert not state.arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_with_the_norm_before_it(model: str, dtype: torch.dtype) -> None:
    """Of numbers whose norms, and the sums of products of these, are exact."""
    count, hidden, routing, biased = MODELS[model]
    bias = random_bias(count).cuda() if biased else None
    weight = signs(count, hidden, seed=1, dtype=dtype) / 32
    norm = 2 ** signs(hidden, seed=2, dtype=dtype), 3.0  # 1 / rms is 1/2
    state, plain = fresh_state(count, "cuda"), fresh_state(count, "cuda")
    for num_tokens in (0, 1, 2, 7, NORM_GATE_TOKENS):
        wide = signs(num_tokens, hidden + 8, seed=num_tokens, dtype=dtype)
        x = wide.where(wide != 0, 1)[:, 8:]
        slots = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
        slots[1::3] = -1
        normed, ids, weights = norm_gate(x, *norm, weight, routing, bias, slots, state)
        expected = ops.norm_gate(x, *norm, weight, routing, bias, slots, plain)
        assert torch.equal(normed, expected[0]) and torch.equal(ids, expected[1]), num_tokens
        kept = slots >= 0
        torch.testing.assert_close(weights[kept], expected[2][kept], rtol=1e-5, atol=1e-30)
        assert torch.equal(state.load, plain.load)
        assert not state.arrivals.any()


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33, FEW_TOKENS + 45])
@settings(max_examples=6, deadline=None, derandomize=True)
@example((6, Routing(top_k=6, scoring="sigmoid"), True), torch.bfloat16, 0)
@given(router_of=routers(4, 6), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_any_router_equals_the_rule_in_float64(
    num_tokens: int, router_of: tuple[int, Routing, bool], dtype: torch.dtype, seed: int
) -> None:
    """Logits are eighths, exact in every dtype, and a bias, mostly negative, keeps scores apart."""
    count, routing, biased = router_of
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (num_tokens, 24), generator=generator).float()
    weight = torch.randint(-4, 5, (count, 24), generator=generator).float() / 8
    bias = random_bias(count, seed) if biased else None
    state = fresh_state(count, "cuda")
    ids, weights = gate(
        x.to("cuda", dtype),
        weight.to("cuda", dtype),
        routing,
        None if bias is None else bias.cuda(),
        torch.arange(num_tokens, dtype=torch.int32, device="cuda"),
        state,
    )
    expected, exact = all_by_hand(x @ weight.T, routing, bias)
    assert torch.equal(ids.cpu(), expected)
    torch.testing.assert_close(weights.cpu().double(), exact, rtol=1e-5, atol=1e-12)
    assert torch.equal(state.load.cpu(), torch.bincount(expected.flatten(), minlength=count))
    assert not state.arrivals.any()


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("num_tokens", [1, 16, 200, 600])
def test_choices_are_as_good_as_those_in_float64(num_tokens: int, model: str) -> None:
    """Real numbers round apart, so an expert may stand for one that is better by no more."""
    count, hidden, routing, biased = MODELS[model]
    bias = random_bias(count).cuda() if biased else None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.randn(count, hidden, generator=generator).to("cuda", torch.bfloat16) / 32
    slots = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    ids, weights = gate(x, weight, routing, bias, slots, fresh_state(count, "cuda"))
    own, exact = ops.gate(
        x.double(), weight.double(), routing, bias, slots, fresh_state(count, "cuda")
    )
    same = (ids.sort(-1).values == own.sort(-1).values).float().mean()
    assert same > 0.97
    equal = (ids == own).all(-1)
    tolerance = 1e-4 if routing.float32_logits else 0.02
    torch.testing.assert_close(weights[equal].double(), exact[equal], rtol=tolerance, atol=1e-9)


@pytest.mark.parametrize("eager", [False, True])
def test_padding_of_captured_steps_is_not_counted(eager: bool, tmp_path: Path) -> None:
    """Batches of every size up to 21, most of them between two captured ones."""
    sizes = {"head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 128}
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe", num_experts=32, **sizes)
    given = {"device": "cuda", "dtype": "bfloat16", "block_size": None, "max_num_seqs": 21}
    prompts = rows(*range(3, 24))
    with tiny_engine(folder, enforce_eager=eager, **given) as engine:
        outputs = engine.generate(prompts, [greedy(2 + index) for index in range(len(prompts))])
        # In the last layer only rows that are sampled from reach the experts.
        sampled = sum(len(output.token_ids) for output in outputs)
        expected = [3 * engine.stats.total_computed_tokens, 3 * sampled]
        assert [int(each.tokens.sum()) for each in engine.expert_load()] == expected


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_routers_in_a_graph_give_what_they_give_one_by_one(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads what the kernel before it has just written, on one set of counters."""
    # A fill between two kernels would keep them apart, which may overlap otherwise.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    count, hidden, routing, _ = MODELS["qwen3-30b-a3b"]
    layers = 12
    router = signs(layers, count, hidden, seed=1, dtype=torch.bfloat16) / 32
    norms = torch.rand(layers, hidden, device="cuda").bfloat16()
    state = fresh_state(count, "cuda")
    entry = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(num_tokens, dtype=torch.int32, device="cuda")

    def run(pause: bool) -> Tensor:
        x, outs = entry, []
        for weight, norm in zip(router, norms, strict=True):
            x = TRITON_OPS.rms_norm(x, norm, 1e-6)
            if pause:
                torch.cuda.synchronize()
            ids, weights = gate(x, weight, routing, None, slots, state)
            outs += [ids.float(), weights]
            if pause:
                torch.cuda.synchronize()
        return torch.stack(outs)

    run(pause=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(pause=False)
    for seed in range(20):
        entry.copy_(signs(num_tokens, hidden, seed=seed, dtype=torch.bfloat16))
        state.load.zero_()
        graph.replay()
        expected = run(pause=True)
        assert torch.equal(out, expected)
        assert int(state.load.sum()) == 2 * layers * num_tokens * routing.top_k


def test_nothing_is_compiled_after_what_prepare_was_told_of() -> None:
    def num_compiled() -> int:
        caches = (*gate_kernel.device_caches.values(), *route_kernel.device_caches.values())
        return sum(len(each[0]) for each in caches)

    count, hidden, routing = 24, 640, Routing(top_k=3)
    weight = torch.randn(count, hidden, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(max(NUM_TOKENS), dtype=torch.int32, device="cuda")
    fresh, state = Gate(), RouterState.fresh(count, torch.device("cuda"))
    fresh.prepare(weight, routing, None, slots[:0], state)

    def run(num_tokens: int) -> None:
        x = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
        fresh(x, weight, routing, None, slots[:num_tokens], state)

    run(1)
    known = num_compiled()
    for num_tokens in NUM_TOKENS:
        run(num_tokens)
    assert num_compiled() == known
