"""The reference step: causal attention by its definition, sequence by sequence."""

from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoints import random_ids, tiny_checkpoint
from tests.helpers.mounting import mount_reference
from torch import Tensor

from rackmount_registry import ops
from rackmount_registry.attention import FP8, AttentionParams, KVScales
from rackmount_registry.step import ReferenceStep, attend_causally

HEADS, KV_HEADS, SIZE = 4, 2, 8


def params(window: int | None = None) -> AttentionParams:
    return AttentionParams(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=0.3, sliding_window=window
    )


def qkv(length: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(length, HEADS, SIZE, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, length, KV_HEADS, SIZE, generator=random, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_token_sees_itself_and_those_before_it_in_its_window(window: int | None) -> None:
    q, k, v = qkv(7)
    out = attend_causally(q, k, v, params(window))
    for token in range(7):
        first = 0 if window is None else max(0, token - window + 1)
        for head in range(HEADS):
            seen = slice(first, token + 1), head // (HEADS // KV_HEADS)
            weights = (0.3 * k[seen] @ q[token, head]).softmax(0)
            torch.testing.assert_close(out[token, head], weights @ v[seen])


@pytest.mark.parametrize("window", [None, 3])
def test_the_last_queries_alone_get_what_they_get_among_all(window: int | None) -> None:
    q, k, v = qkv(7)
    whole = attend_causally(q, k, v, params(window))
    torch.testing.assert_close(attend_causally(q[5:], k, v, params(window)), whole[5:])


class Fp8Layer:
    """Stores keys and values as they come."""

    index, params = 0, params()
    kv_scales = KVScales(k=torch.tensor([0.01, 0.003]), v=torch.tensor([0.5, 0.02]))

    def store(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        fixed = (torch.zeros(len(q)), None, None, None, 0.0, False)
        return ops.rotary_write(q, k, v, *fixed, cache, slots, self.kv_scales.k, self.kv_scales.v)


def nearest(x: Tensor, scale: Tensor) -> Tensor:
    """x [T, G, D] to the nearest of all finite FP8 numbers, times the scale [G]."""
    numbers = torch.arange(256).to(torch.uint8).view(FP8).double()
    numbers = numbers[numbers.isfinite()]
    scale = scale.double().unsqueeze(-1)
    places = (x / scale).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    return numbers[places] * scale


def test_an_fp8_cache_is_attended_to_as_what_it_stands_for() -> None:
    q, k, v = qkv(7)
    step, layer = ReferenceStep(), Fp8Layer()
    step.begin([4, 3])
    keys, values = nearest(k, layer.kv_scales.k), nearest(v, layer.kv_scales.v)
    parts = zip(*(t.split((4, 3)) for t in (q, keys, values)), strict=True)
    expected = torch.cat([attend_causally(*each, layer.params) for each in parts])
    torch.testing.assert_close(step.attend(layer, q, k, v), expected)


def test_positions_begin_again_with_each_sequence() -> None:
    step = ReferenceStep()
    step.begin([3, 0, 2])
    assert step.positions.tolist() == [0, 1, 2, 0, 1]
    step.begin([])
    assert step.positions.tolist() == []


def test_sequences_of_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3")
    reference = mount_reference(folder, dtype=torch.float64)
    first, second, none = random_ids(7, seed=1), random_ids(3, seed=2), random_ids(0)
    alone = torch.cat((reference.logits(first), reference.logits(second)))
    torch.testing.assert_close(reference.logits(first, none, second), alone, rtol=0, atol=1e-12)
    assert reference.logits(none).shape == (0, 97)
