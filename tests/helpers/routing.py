"""Routers written out token by token in Python's float64, and the ways in which models route."""

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from rackmount_registry.experts import RouterState, Routing

ROUTINGS: dict[str, tuple[int, Routing, bool]] = {
    "qwen3": (16, Routing(top_k=4), False),
    "qwen3, not renormalized": (12, Routing(top_k=3, renormalize=False), False),
    "one expert a token": (5, Routing(top_k=1), False),
    "all experts": (6, Routing(top_k=6), False),
    "one group": (8, Routing(top_k=3, num_groups=1, top_groups=1, scoring="sigmoid"), True),
    "deepseek-v2, greedy": (
        12,
        Routing(top_k=3, renormalize=False, scaling=1.5, float32_logits=True),
        False,
    ),
    "deepseek-v2, group-limited": (
        20,
        Routing(
            top_k=4,
            renormalize=False,
            num_groups=4,
            top_groups=2,
            scaling=16.0,
            float32_logits=True,
        ),
        False,
    ),
    "deepseek-v3": (
        16,
        Routing(
            top_k=4,
            scoring="sigmoid",
            num_groups=4,
            top_groups=2,
            group_score="top2_sum",
            scaling=2.5,
            float32_logits=True,
        ),
        True,
    ),
    "deepseek-v3 with three groups, not renormalized": (
        15,
        Routing(
            top_k=5,
            scoring="sigmoid",
            renormalize=False,
            num_groups=3,
            top_groups=1,
            group_score="top2_sum",
            scaling=2.5,
        ),
        True,
    ),
    "softmax with a bias and groups by two": (
        8,
        Routing(top_k=4, num_groups=2, top_groups=2, group_score="top2_sum"),
        True,
    ),
}
"""Number of experts, routing, and whether there is a bias."""


def route_by_hand(
    logits: Sequence[float], routing: Routing, bias: Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """Ids and weights of one token."""
    if routing.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = math.fsum(math.exp(x - max(logits)) for x in logits)
        scores = [math.exp(x - max(logits)) / total for x in logits]
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(scores) // routing.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(routing.num_groups)]

    def worth(group: range) -> float:
        best = sorted((choice[e] for e in group), reverse=True)
        return best[0] if routing.group_score == "max" else best[0] + best[1]

    kept = sorted(groups, key=lambda group: (-worth(group), group.start))[: routing.top_groups]
    ids = sorted((e for group in kept for e in group), key=lambda e: (-choice[e], e))
    ids = ids[: routing.top_k]
    chosen = [scores[e] for e in ids]
    if routing.renormalize:
        total = math.fsum(chosen) + 1e-20
        chosen = [weight / total for weight in chosen]
    return ids, [weight * routing.scaling for weight in chosen]


def all_by_hand(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids int32 and weights float64 [T, K] of logits [T, experts]."""
    added = None if bias is None else bias.tolist()
    rows = [route_by_hand(row, routing, added) for row in logits.double().tolist()]
    shape = (len(rows), routing.top_k)
    ids = torch.tensor([ids for ids, _ in rows], dtype=torch.int32).reshape(shape)
    weights = torch.tensor([each for _, each in rows], dtype=torch.float64).reshape(shape)
    return ids, weights


def random_bias(num_experts: int, seed: int = 0) -> Tensor:
    """float32 [experts]: as large as the scores, mostly negative."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_experts, generator=generator) - 0.7


def fresh_state(num_experts: int, device: str = "cpu") -> RouterState:
    return RouterState.fresh(num_experts, torch.device(device))


@st.composite
def routers(draw: st.DrawFn, most_groups: int, most_size: int) -> tuple[int, Routing, bool]:
    """Number of experts, in up to so many groups of up to so many; routing; whether there is a
    bias. All experts, or all groups, are chosen often."""
    num_groups, size = draw(st.integers(1, most_groups)), draw(st.integers(1, most_size))
    top_groups = draw(st.just(num_groups) | st.integers(1, num_groups))
    most = min(8, size * top_groups)
    routing = Routing(
        top_k=draw(st.just(most) | st.integers(1, most)),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(st.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2_sum"] if size > 1 else ["max"])),
        scaling=draw(st.sampled_from([1.0, 2.5])),
        float32_logits=draw(st.booleans()),
    )
    return num_groups * size, routing, draw(st.booleans())
