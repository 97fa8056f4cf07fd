"""The definition of the op `sample`, on its own."""

import math
from typing import Any

import pytest
import torch
from tests.helpers.sampling import state_of

from rackmount.sampling.params import SamplingParams
from rackmount_registry.ops import reference_ops
from rackmount_registry.sampling import Draw, SamplingState
from rackmount_registry.sampling.draw import draw_top_k, draw_top_p
from rackmount_registry.sampling.random import row_keys

V = 2500


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 2.0, 5.0])
def test_top_p_gives_the_same_tokens_whether_or_not_it_ranks_the_whole_vocabulary(
    scale: float,
) -> None:
    num = 64
    logits = torch.randn(num, V, generator=torch.Generator().manual_seed(3)) * scale
    keys = row_keys(torch.arange(num), torch.arange(num))
    settings = torch.tensor([[0.9, V, 0.8, -math.inf]], dtype=torch.float64).repeat(num, 1)
    settings[::2, 2] = 0.3
    settings[::3, 3] = -1.0
    top = logits.amax(-1, keepdim=True)
    whole = draw_top_k(logits, top, settings, keys, V)
    assert torch.equal(draw_top_p(logits, top, settings, keys), whole)


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**given)


KINDS = [params(temperature=0), params(), params(top_k=7), params(top_p=0.8)]


def test_tokens_are_int32_and_those_of_the_rows_named() -> None:
    state = state_of(KINDS, V)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(4) + 9
    tokens = reference_ops().sample(logits.clone(), torch.arange(4), positions, state)
    assert tokens.dtype == torch.int32
    order = torch.tensor([2, 0, 3, 1])
    for dtype in (torch.int32, torch.int64):
        got = reference_ops().sample(
            logits[order], order.to(dtype), positions[order].to(dtype), state
        )
        assert torch.equal(got, tokens[order])


def test_the_padding_row_is_greedy_however_often_it_is_named() -> None:
    state = state_of([params(top_k=3)] * 2, V)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(5))
    tokens = reference_ops().sample(logits, torch.tensor([2, 0, 2]), torch.zeros(3).long(), state)
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert SamplingState.greedy(2, torch.device("cpu")).draws.tolist() == [Draw.GREEDY] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_dtype_gives_the_tokens_of_the_same_numbers_in_float32(dtype: torch.dtype) -> None:
    state = state_of(KINDS, V)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(6)).to(dtype)
    rows, positions = torch.arange(4), torch.arange(4)
    narrow = reference_ops().sample(logits.clone(), rows, positions, state)
    assert torch.equal(reference_ops().sample(logits.float(), rows, positions, state), narrow)


def test_no_row_gives_no_token() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    tokens = reference_ops().sample(torch.zeros(0, V), nothing, nothing, state_of(KINDS, V))
    assert tokens.shape == (0,)
