"""The definitions of the operations, against the formulas that they stand for."""

import math

import pytest
import torch
from torch import Tensor

from rackmount_registry import ops
from rackmount_registry.experts import Routing
from rackmount_registry.ops import IN_PROMPT


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_name_is_an_operation() -> None:
    assert all(callable(getattr(ops.reference_ops(), name)) for name in ops.OPS)


def test_a_norm_divides_by_the_root_of_the_mean_square() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    out = ops.rms_norm(x, torch.tensor([1.0, 10.0], dtype=torch.float64), 0.5)
    expected = [3 / math.sqrt(13), 40 / math.sqrt(13)]
    torch.testing.assert_close(out, torch.tensor([expected], dtype=torch.float64))


def test_a_norm_in_a_narrow_dtype_is_computed_wide_and_rounded_once() -> None:
    x, weight = randn(5, 24).bfloat16(), torch.ones(24, dtype=torch.bfloat16)
    expected = ops.rms_norm(x.double(), weight.double(), 1e-6).bfloat16()
    assert (ops.rms_norm(x, weight, 1e-6) == expected).float().mean() > 0.99


def test_a_fused_norm_gives_the_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = randn(3, 8), randn(3, 8, seed=1), randn(8, seed=2)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-5))


def turned(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """q, and the keys as they come to stand in a cache."""
    cache = torch.stack((k, k))
    given = (positions, table, q_norm, k_norm, 0.1, interleaved)
    q = ops.rotary_write(q, k, k, *given, cache, torch.arange(len(k)))
    return q, cache[0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_of_features_as_complex_numbers(interleaved: bool) -> None:
    width, positions = 6, torch.tensor([0, 5, 2])
    angles = torch.outer(torch.arange(7.0), torch.tensor([1.0, 0.3, 0.1])).double()
    table = torch.stack((angles.cos(), angles.sin()), 1)
    q, k = randn(3, 4, width + 2), randn(3, 2, width + 2, seed=1)
    results = turned(q, k, positions, table, interleaved=interleaved)
    turns = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    order = [0, 2, 4, 1, 3, 5] if interleaved else [0, 1, 2, 3, 4, 5]
    for given, result in zip((q, k), results, strict=True):
        real, imaginary = given[..., order].chunk(2, -1)
        expected = torch.complex(real, imaginary) * turns
        both = torch.cat((expected.real, expected.imag), -1)
        torch.testing.assert_close(result[..., order], both)
        assert torch.equal(result[..., width:], given[..., width:])


def test_heads_are_normed_before_they_are_turned() -> None:
    table = torch.stack((torch.zeros(1, 2), torch.ones(1, 2)), 1).double()  # a quarter turn
    given = randn(1, 2, 4), randn(1, 1, 4, seed=1)
    norms = randn(4, seed=2), randn(4, seed=3)
    results = turned(*given, torch.tensor([0]), table, *norms)
    for x, norm, result in zip(given, norms, results, strict=True):
        a, b = ops.rms_norm(x, norm, 0.1).chunk(2, -1)
        torch.testing.assert_close(result, torch.cat((-b, a), -1))


def test_without_a_table_nothing_is_turned() -> None:
    q, k, norm = randn(3, 2, 4), randn(3, 1, 4, seed=1), randn(4, seed=2)
    positions = torch.tensor([0, 5, 2])
    for found, given in zip(turned(q, k, positions, None), (q, k), strict=True):
        assert torch.equal(found, given)
    for found, given in zip(turned(q, k, positions, None, norm, norm), (q, k), strict=True):
        assert torch.equal(found, ops.rms_norm(given, norm, 0.1))


def test_queries_and_keys_are_mapped_once_they_are_turned() -> None:
    angles = torch.outer(torch.arange(7.0), torch.tensor([1.0, 0.3])).double()
    table = torch.stack((angles.cos(), angles.sin()), 1)
    q, k, v = randn(3, 4, 5), randn(3, 2, 5, seed=1), randn(3, 2, 5, seed=2)
    maps, positions = (randn(5, 5, seed=3), randn(5, 5, seed=4)), torch.tensor([0, 5, 2])
    cache = torch.stack((k, k))
    given = (positions, table, None, None, 0.0, False, cache, torch.arange(3), None, None, *maps)
    found = ops.rotary_write(q, k, v, *given)
    for x, plain, matrix in zip(
        (found, cache[0]), turned(q, k, positions, table), maps, strict=True
    ):
        torch.testing.assert_close(x, torch.einsum("tnd,de->tne", plain, matrix))
    assert torch.equal(cache[1], v)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    k, v = randn(4, 2, 4).float(), randn(4, 2, 4, seed=1).float()
    cache = torch.full((2, 6, 2, 4), math.nan, dtype=torch.bfloat16)
    slots = torch.tensor([5, -1, 0, -1], dtype=torch.int32)
    ops.rotary_write(k, k, v, torch.arange(4), None, None, None, 0.0, False, cache, slots)
    for plane, given in zip(cache, (k, v), strict=True):
        assert torch.equal(plane[[5, 0]], given[[0, 2]].bfloat16())
        assert plane[1:5].isnan().all()


def test_an_fp8_cache_holds_quotients_to_the_nearest_and_cut_off_at_448() -> None:
    k = torch.tensor([[[0.37, 1000.0, -1000.0, math.nan]], [[-3.7, 0.0, 170.0, 1e-9]]])
    cache = torch.zeros(2, 2, 1, 4, dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.37]), torch.tensor([2.0])
    given = (torch.arange(2), None, None, None, 0.0, False, cache, torch.arange(2))
    ops.rotary_write(k, k, 2 * k, *given, *scales)
    keys, values = cache.float().squeeze(2)
    assert keys.isnan().nonzero().tolist() == values.isnan().nonzero().tolist() == [[0, 3]]
    assert keys.nan_to_num(0).tolist() == [[1, 448, -448, 0], [-10, 0, 448, 0]]
    assert values.nan_to_num(0).tolist() == [[0.375, 448, -448, 0], [-3.75, 0, 176, 0]]


def test_tokens_sampled_on_the_device_take_the_place_of_their_row() -> None:
    last_ids = torch.tensor([70, 71, 72], dtype=torch.int32)
    ids = torch.tensor([-3, 5, 0, -1], dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int32)
    tables = torch.empty(3, 4, dtype=torch.int32)
    ops.build_batch(ids, none, none, last_ids, tables, tables[:0], 16)
    assert ids.tolist() == [72, 5, 0, 70]


def test_requests_get_the_blocks_of_their_rows_as_far_as_they_are_long() -> None:
    tables = torch.arange(12, dtype=torch.int32).view(3, 4)
    table = torch.full((2, 4), -9, dtype=torch.int32)
    rows, lengths = (torch.tensor(t, dtype=torch.int32) for t in ([2, 0], [17, 32]))
    ops.build_batch(rows[:0].clone(), rows, lengths, rows, tables, table, 16)
    assert table[:, :2].tolist() == [[8, 9], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_penalties_are_of_the_tokens_that_are_there(dtype: torch.dtype) -> None:
    """Of the row that is named: a neutral one, and two that have all penalties."""
    factors = torch.tensor([[1.0, 0, 0], [2, 0.25, 1]], dtype=torch.float64)
    counts = torch.tensor([[0, IN_PROMPT, 1, IN_PROMPT + 2, 0]] * 2, dtype=torch.int32)
    given = [[-math.inf, -1.5, 4, 3, -0.0], [math.nan, 4, -4, 0, -math.inf]]
    logits = torch.tensor([given[0], *given], dtype=dtype)
    before = logits.clone()
    ops.penalize(logits, torch.tensor([0, 1, 1], dtype=torch.int32), factors, counts)
    assert torch.equal(logits[0], before[0])
    assert logits[1].tolist() == [-math.inf, -3, 2 - 1.25, 1.5 - 1.5, 0]
    assert logits[2, 0].isnan() and logits[2, 1:].tolist() == [2, -8 - 1.25, -1.5, -math.inf]


def test_log_probabilities_are_in_the_order_of_the_logits() -> None:
    """Also where they round to the same: 2**-23 above 1 is lost beside 20."""
    row = torch.tensor([1.0, -math.inf, 1 + 2**-23, 20, 20, -math.inf])
    ids, values, ranks = ops.logprobs(row[None], torch.tensor([0]), 6)
    assert ids.tolist() == [[0, 3, 4, 2, 0, 1, 5]] and ranks.tolist() == [4]
    assert values[0, 0] == values[0, 3] < values[0, 1] == values[0, 2]
    expected = row.double().log_softmax(-1)[ids]
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    for bad in (math.nan, math.inf):
        row[1] = bad
        ids, values, _ = ops.logprobs(row[None].double(), torch.tensor([5]), 2)
        assert ids.tolist() == [[5, 1, 3]] and values.isnan().all()


def test_an_embedding_gives_zeros_for_ids_of_other_ranks() -> None:
    weight = randn(3, 2)
    rows = ops.embedding(torch.tensor([4, 0, 6, 7, 3]), weight, 4)
    assert torch.equal(
        rows, torch.stack([weight[0], 0 * weight[0], weight[2], *[0 * weight[0]] * 2])
    )
    empty = ops.embedding(torch.tensor([4]), weight[:0], 4)
    assert torch.equal(empty, torch.zeros(1, 2, dtype=torch.float64))


def test_experts_of_equal_score_come_lowest_id_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    ids, weights = ops.route(logits, Routing(top_k=4), None)
    assert ids.tolist() == [[1, 2, 4, 0]]
    big, small = math.e / (3 * math.e + 1), 1 / (3 * math.e + 1)
    torch.testing.assert_close(weights, torch.tensor([[big, big, big, small]]))


def test_weights_are_shares_of_all_experts_unless_renormalized() -> None:
    logits = randn(6, 5)
    ids, weights = ops.route(logits, Routing(top_k=2, renormalize=False), None)
    torch.testing.assert_close(weights, logits.softmax(-1).gather(-1, ids))
    _, shares = ops.route(logits, Routing(top_k=2, renormalize=True), None)
    torch.testing.assert_close(shares, weights / weights.sum(-1, keepdim=True))


def test_weights_are_wide_even_for_narrow_logits() -> None:
    assert ops.route(randn(2, 5).bfloat16(), Routing(top_k=2), None)[1].dtype == torch.float32
    assert ops.route(randn(2, 5), Routing(top_k=2), None)[1].dtype == torch.float64
    assert [t.shape for t in ops.route(randn(0, 5), Routing(top_k=2), None)] == [(0, 2)] * 2
