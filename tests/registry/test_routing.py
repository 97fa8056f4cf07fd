"""The definition of routing, against routers written out in float64 and those of transformers."""

import math
from typing import Any

import pytest
import torch
from tests.helpers.routing import ROUTINGS, all_by_hand, fresh_state, random_bias
from torch import Tensor

from rackmount_registry import ops
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import Routing

HIDDEN = 12


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_routers_equal_the_rule_written_out(case: str, num_tokens: int) -> None:
    count, routing, biased = ROUTINGS[case]
    bias = random_bias(count) if biased else None
    logits = 3 * randn(num_tokens, count)
    ids, weights = ops.route(logits, routing, bias)
    expected, exact = all_by_hand(logits, routing, bias)
    assert ids.dtype == torch.int32 and torch.equal(ids, expected)
    torch.testing.assert_close(weights, exact, rtol=1e-12, atol=1e-300)
    ids, weights = ops.route(logits.float(), routing, bias)
    assert weights.dtype == torch.float32 and torch.equal(ids, expected)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("case", ROUTINGS)
def test_experts_and_groups_of_equal_score_come_lowest_first(case: str) -> None:
    count, routing, biased = ROUTINGS[case]
    bias = torch.zeros(count) if biased else None
    logits = torch.randint(2, (40, count), generator=torch.Generator().manual_seed(0)).double()
    ids, _ = ops.route(logits, routing, bias)
    assert torch.equal(ids, all_by_hand(logits, routing, bias)[0])
    ids, _ = ops.route(torch.zeros(1, count), routing, bias)
    assert ids.tolist() == [list(range(routing.top_k))]


def test_a_bias_decides_who_is_chosen_and_nothing_else() -> None:
    routing = Routing(top_k=2, scoring="sigmoid", renormalize=False)
    logits = torch.tensor([[2.0, 1.0, -3.0, 0.0]])
    ids, weights = ops.route(logits, routing, torch.tensor([-1.0, -1.0, 0.5, 0.0]))
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [2, 3]])


def test_experts_outside_the_best_groups_lose_to_negative_scores_within() -> None:
    """A mask of zeros would prefer them to what a bias has made negative."""
    routing = ROUTINGS["deepseek-v3"][1]
    logits, bias = torch.zeros(1, 16), torch.full((16,), -2.0)
    bias[4:8] = -1.9
    assert ops.route(logits, routing, bias)[0].tolist() == [[4, 5, 6, 7]]


def test_scores_that_vanish_leave_weights_of_zero() -> None:
    routing = Routing(top_k=2, scoring="sigmoid")
    _, weights = ops.route(torch.full((1, 4), -1000.0, dtype=torch.float64), routing, None)
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_nan_is_chosen_first_and_stays_seen() -> None:
    logits = torch.tensor([[0.0, math.nan, 2.0], [0.0, 1.0, 2.0]])
    for scoring in ("softmax", "sigmoid"):
        ids, weights = ops.route(logits, Routing(top_k=2, scoring=scoring), None)
        assert ids.tolist() == [[1, 2], [2, 1]]
        assert weights[0].isnan().all() and not weights[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("float32_logits", [False, True])
def test_a_router_routes_its_logits_as_rounded(dtype: torch.dtype, float32_logits: bool) -> None:
    x, weight = randn(9, HIDDEN).to(dtype), randn(8, HIDDEN, seed=1).to(dtype)
    routing = Routing(top_k=3, float32_logits=float32_logits)
    found = ops.gate(x, weight, routing, None, torch.arange(9), fresh_state(8))
    logits = x.float() @ weight.float().T
    expected = ops.route(logits if float32_logits else logits.to(dtype), routing, None)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_padding_goes_to_no_expert_and_is_not_counted() -> None:
    x, weight, state = randn(6, HIDDEN), randn(8, HIDDEN, seed=1), fresh_state(8)
    slots = torch.tensor([4, -1, 0, 7, -1, -1], dtype=torch.int32)
    whole, _ = ops.gate(x, weight, Routing(top_k=3), None, slots.abs(), fresh_state(8))
    for _ in range(2):
        ids, _ = ops.gate(x, weight, Routing(top_k=3), None, slots, state)
    assert torch.equal(ids[slots >= 0], whole[slots >= 0])
    assert (ids[slots < 0] == -1).all()
    assert torch.equal(state.load, 2 * torch.bincount(ids[slots >= 0].flatten(), minlength=8))
    assert int(state.load.sum()) == 2 * 3 * 3
    assert not state.arrivals.any()


def test_a_token_is_routed_alone_as_in_a_batch() -> None:
    weight, routing = randn(8, HIDDEN), Routing(top_k=3)
    x = randn(9, HIDDEN, seed=1)
    ids, weights = ops.gate(x, weight, routing, None, torch.arange(9), fresh_state(8))
    for token in range(9):
        alone = x[token : token + 1]
        own = ops.gate(alone, weight, routing, None, torch.zeros(1), fresh_state(8))
        assert torch.equal(own[0], ids[token : token + 1])
        torch.testing.assert_close(own[1], weights[token : token + 1], rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"top_k": 9}, "top_k=9 must be 1 to 8, .* choose from"),
        ({"top_k": 0}, "top_k=0 must be 1 to 8"),
        ({"num_groups": 3}, "num_groups=3 must divide 8 experts"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups=3 must be 1 to num_groups=2"),
        ({"top_groups": 0}, "top_groups=0 must be 1 to num_groups=1"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "top_k=3 must be 1 to 2"),
        ({"num_groups": 8, "top_groups": 8, "group_score": "top2_sum"}, "2 experts, not of 1"),
    ],
)
def test_what_cannot_be_routed_is_refused(wrong: dict[str, Any], rule: str) -> None:
    Routing(top_k=2).check(8)
    with pytest.raises(ConfigError, match=rule):
        Routing(**({"top_k": 2} | wrong)).check(8)


def their_router(family: str, **sizes: Any) -> tuple[Any, Tensor]:
    """A router of transformers with random weights, and its input."""
    import transformers

    config = getattr(transformers, f"{family}Config")(hidden_size=HIDDEN, **sizes)
    module = getattr(transformers.models, config.model_type)
    modeling = getattr(module, f"modeling_{config.model_type}")
    name = "TopkRouter" if family.startswith("Deepseek") else "TopKRouter"
    router = getattr(modeling, f"{family}{name}")(config)
    with torch.no_grad():
        router.weight.copy_(randn(*router.weight.shape, seed=5))
    return router, randn(50, HIDDEN, seed=6).float()


DEEPSEEK = {
    "num_experts_per_tok": 4,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_attention_heads": 4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], Routing]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
        Routing(top_k=4),
    ),
    "qwen3-moe, not renormalized": (
        "Qwen3Moe",
        {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False},
        Routing(top_k=4, renormalize=False),
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        Routing(top_k=2),
    ),
    "deepseek-v2, greedy": (
        "DeepseekV2",
        DEEPSEEK | {"topk_method": "greedy", "routed_scaling_factor": 1.5},
        Routing(top_k=4, renormalize=False, scaling=1.5, float32_logits=True),
    ),
    "deepseek-v2, group-limited": (
        "DeepseekV2",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        ROUTINGS["deepseek-v2, group-limited"][1],
    ),
    **{
        f"deepseek-v3, {'' if normed else 'not '}renormalized": (
            "DeepseekV3",
            DEEPSEEK | {"norm_topk_prob": normed, "routed_scaling_factor": 2.5},
            Routing(
                top_k=4,
                scoring="sigmoid",
                renormalize=normed,
                num_groups=4,
                top_groups=2,
                group_score="top2_sum",
                scaling=2.5,
                float32_logits=True,
            ),
        )
        for normed in (False, True)
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_transformers_choose_the_same(family: str, dtype: torch.dtype) -> None:
    theirs, sizes, routing = FAMILIES[family]
    router, x = their_router(theirs, **sizes)
    router, x = router.to(dtype), x.to(dtype)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias = random_bias(len(bias))
        router.e_score_correction_bias = bias
    with torch.no_grad():
        _, their_weights, their_ids = router(x)
    weight = router.weight.detach()
    state = fresh_state(len(weight))
    ids, weights = ops.gate(x, weight, routing, bias, torch.arange(len(x)), state)
    sets = [each.sort(-1) for each in (ids.long(), their_ids)]  # some give them in no order
    assert torch.equal(sets[0].values, sets[1].values)
    aligned = (
        each.gather(-1, found.indices).float()
        for each, found in zip((weights, their_weights), sets, strict=True)
    )
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8  # Qwen's weights are of the dtype
    torch.testing.assert_close(*aligned, rtol=tolerance, atol=0)
