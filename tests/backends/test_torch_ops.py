"""Each operation of the op set "torch" against its definition."""

import math

import pytest
import torch
from tests.helpers.ops import Checker
from torch import Tensor

from rackmount_backends.torch_ops import TORCH_OPS
from rackmount_registry import ops
from rackmount_registry.ops import OPS

TOLERANCES = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.bfloat16: 0.0,
    torch.float16: 0.0,
}
"""Narrow results are the definition's to the bit: where they round is part of it."""

all_dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
any_number_of_tokens = pytest.mark.parametrize("num_tokens", [0, 1, 5])


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def table(width: int) -> Tensor:
    angles = torch.arange(50).unsqueeze(1) * torch.logspace(0, -3, width // 2)
    return torch.stack((angles.cos(), angles.sin()), 1)


def assert_equal(found: Tensor, defined: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, defined, rtol=tolerance, atol=tolerance)


def test_every_operation_is_offered() -> None:
    assert set(vars(TORCH_OPS)) == set(OPS)


@all_dtypes
@any_number_of_tokens
def test_norms_equal_their_definition(dtype: torch.dtype, num_tokens: int) -> None:
    x, residual = (randn(num_tokens, 24, dtype=dtype, seed=s) for s in (1, 2))
    weight = randn(24, dtype=dtype, seed=3)
    normed, total = TORCH_OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_equal(normed, ops.rms_norm(total, weight, 1e-5), dtype)
    assert_equal(TORCH_OPS.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5), dtype)


@all_dtypes
def test_a_norm_takes_the_heads_of_a_view(dtype: torch.dtype) -> None:
    heads = randn(3, 40, dtype=dtype)[:, 8:].unflatten(1, (4, 8))
    weight = randn(8, dtype=dtype, seed=1)
    assert_equal(TORCH_OPS.rms_norm(heads, weight, 0.1), ops.rms_norm(heads, weight, 0.1), dtype)


@all_dtypes
@any_number_of_tokens
def test_the_gate_takes_halves_of_one_tensor_and_leaves_them(
    dtype: torch.dtype, num_tokens: int
) -> None:
    joined = randn(num_tokens, 32, dtype=dtype)
    before = joined.clone()
    gate, up = joined.chunk(2, -1)
    assert_equal(TORCH_OPS.silu_mul(gate, up), ops.silu_mul(gate, up), dtype)
    assert torch.equal(joined, before)


@all_dtypes
@any_number_of_tokens
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [0, 4, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_write_equals_its_definition(
    dtype: torch.dtype, num_tokens: int, interleaved: bool, width: int, normed: bool
) -> None:
    joined = randn(num_tokens, 10, 8, dtype=dtype)
    before = joined.clone()
    norms = [randn(8, dtype=dtype, seed=s) if normed else None for s in (1, 2)]
    positions = torch.tensor([49, 0, 7, 7, 12])[:num_tokens]
    slots = torch.tensor([3, -1, 0, 9, -1])[:num_tokens]
    results = []
    for set_ in (TORCH_OPS, ops.reference_ops()):
        cache = torch.full((2, 10, 2, 8), math.nan, dtype=dtype)
        q = set_.rotary_write(
            *joined.split((6, 2, 2), 1),
            positions,
            table(width) if width else None,
            *norms,
            1e-6,
            interleaved,
            cache,
            slots,
        )
        assert q.dtype == dtype
        results.append((q, cache))
    (found, found_cache), (defined, defined_cache) = results
    assert_equal(found, defined, dtype)
    written = slots[slots >= 0]
    assert_equal(found_cache[:, written], defined_cache[:, written], dtype)
    assert torch.equal(found_cache.isnan(), defined_cache.isnan())
    assert torch.equal(joined, before)


@all_dtypes
@any_number_of_tokens
@pytest.mark.parametrize("scales", [(0.37, 0.01), (1e-3, 30.0)])
def test_an_fp8_cache_gets_quotients_that_end_at_448(
    dtype: torch.dtype, num_tokens: int, scales: tuple[float, float]
) -> None:
    checker = Checker(op_set=TORCH_OPS, device="cpu", dtype=dtype)
    checker.rotary_write((6, 2, 8), 8, normed=True, num_tokens=num_tokens, scales=scales)


@pytest.mark.parametrize("scales", [None, (0.4, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_and_keys_are_mapped(
    dtype: torch.dtype, scales: tuple[float, float] | None
) -> None:
    checker = Checker(op_set=TORCH_OPS, device="cpu", dtype=dtype)
    checker.rotary_write((6, 2, 8), 8, normed=True, scales=scales, are_mapped=True)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_a_cache_may_be_narrower_than_the_keys(integers: torch.dtype) -> None:
    q, k, v = randn(4, 4, 8, dtype=torch.float32).split((2, 1, 1), 1)
    cache = torch.zeros(2, 5, 1, 8, dtype=torch.bfloat16)
    positions, slots = torch.tensor([[0, 1, 2, 3], [4, 2, 0, 1]], dtype=integers)
    TORCH_OPS.rotary_write(q, k, v, positions, None, None, None, 0.0, False, cache, slots)
    assert torch.equal(cache[:, slots.long()], torch.stack((k, v)).bfloat16())
    assert not cache[:, 3].any()


def test_the_other_operations_are_the_definitions() -> None:
    for name in ("embedding", "gate", "build_batch", "penalize", "sample", "logprobs"):
        assert getattr(TORCH_OPS, name) is getattr(ops, name)
