"""Each operation of the op set "torch" against its definition."""

import pytest
import torch
from torch import Tensor

from rackmount_backends.torch_ops import TORCH_OPS
from rackmount_registry import ops
from rackmount_registry.experts import Routing
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
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_equals_its_definition(
    dtype: torch.dtype, num_tokens: int, interleaved: bool, width: int, normed: bool
) -> None:
    joined = randn(num_tokens, 10, 8, dtype=dtype)
    before = joined.clone()
    q, k, _ = joined.split((6, 2, 2), 1)
    norms = [randn(8, dtype=dtype, seed=s) if normed else None for s in (1, 2)]
    positions = torch.tensor([49, 0, 7, 7, 12])[:num_tokens]
    given = (positions, table(width), *norms, 1e-6, interleaved)
    for found, defined in zip(
        TORCH_OPS.rotary(q, k, *given), ops.rotary(q, k, *given), strict=True
    ):
        assert found.dtype == dtype
        assert_equal(found, defined, dtype)
    assert torch.equal(joined, before)


def test_embedding_and_routing_are_the_definitions() -> None:
    ids, weight = torch.tensor([3, 9, 4]), randn(4, 8)
    assert torch.equal(TORCH_OPS.embedding(ids, weight, 2), ops.embedding(ids, weight, 2))
    logits, routing = randn(3, 6), Routing(top_k=2)
    for found, defined in zip(
        TORCH_OPS.route(logits, routing), ops.route(logits, routing), strict=True
    ):
        assert torch.equal(found, defined)
