"""Checks of an op set against the definitions, in float32 and narrower, on any device."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from rackmount_registry import ops
from rackmount_registry.attention import FP8

STEPS = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Distance between neighbouring numbers, relative."""
FLOAT32_TOLERANCE = 4e-6


@dataclass(frozen=True, kw_only=True)
class Checker:
    """An op set on a device, in a dtype."""

    op_set: SimpleNamespace
    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

    def integers(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def assert_equal(self, found: Tensor, defined: Tensor, scale: float = 1.0) -> None:
        """Float32 within its accuracy; narrow results are those of the definition, but for a few
        that fall to the neighbour. `scale` is the size of the terms of a sum."""
        assert found.dtype == defined.dtype == self.dtype
        assert found.shape == defined.shape
        tolerance = 2 * STEPS.get(self.dtype, FLOAT32_TOLERANCE / 2)
        torch.testing.assert_close(found, defined, rtol=tolerance, atol=tolerance * scale)
        if self.dtype in STEPS:
            assert int((found != defined).sum()) <= max(1, found.numel() // 50)

    def norms(self, num_tokens: int, size: int) -> None:
        """Both norms; x and residual are views of wider tensors."""
        x = self.randn(num_tokens, size + 8)[:, :size]
        residual = self.randn(num_tokens, size + 16, seed=1)[:, :size]
        weight = self.randn(size, seed=2)
        before = x.clone(), residual.clone()
        found = self.op_set.rms_norm(x, weight, 1e-5)
        self.assert_equal(found, ops.rms_norm(x, weight, 1e-5))
        normed, total = self.op_set.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        self.assert_equal(normed, ops.rms_norm(total, weight, 1e-5))
        for given, kept in zip((x, residual), before, strict=True):
            assert torch.equal(given, kept)

    def head_norm(self) -> None:
        """Heads of a wider tensor, and other numbers of dimensions."""
        weight = self.randn(20, seed=1)
        heads = self.randn(3, 120)[:, 40:].unflatten(1, (4, 20))
        for x in (heads, heads[0, 0], heads[0], heads.unsqueeze(1), heads[:0]):
            found = self.op_set.rms_norm(x, weight, 0.1)
            self.assert_equal(found, ops.rms_norm(x, weight, 0.1))

    def silu_mul(self, num_tokens: int, size: int) -> None:
        """Halves of one tensor, with numbers whose exponential overflows."""
        joined = 3 * self.randn(num_tokens, 2 * size)
        if num_tokens:
            joined[0, 0], joined[-1, size - 1] = -200.0, 200.0
        gate, up = joined.chunk(2, -1)
        self.assert_equal(self.op_set.silu_mul(gate, up), ops.silu_mul(gate, up))

    def rotary_write(
        self,
        heads: tuple[int, int, int],
        rotated: int,
        *,
        normed: bool = False,
        interleaved: bool = False,
        integers: torch.dtype = torch.int64,
        num_tokens: int = 3,
        cache_dtype: torch.dtype | None = None,
        scales: tuple[float, float] | None = None,
        are_mapped: bool = False,
    ) -> None:
        """q, k and v are views of one tensor; heads are (H, G, D). Some tokens are padding, and
        the cache is NaN where nothing is written. `scales` of the first head's keys and values are
        of an FP8 cache; each next head's are twice as large."""
        num_heads, groups, size = heads
        joined = self.randn(num_tokens, (num_heads + 2 * groups) * size)
        before = joined.clone()
        widths = (num_heads * size, groups * size, groups * size)
        q, k, v = (t.unflatten(1, (-1, size)) for t in joined.split(widths, 1))
        norms = [self.randn(size, seed=s) if normed else None for s in (1, 2)]
        positions = self.integers([(31 * t + 49) % 50 for t in range(num_tokens)], integers)
        slots = self.integers([-1 if t % 3 == 1 else num_tokens - t for t in range(num_tokens)])
        slots = slots.to(integers)
        table = angles(rotated).to(self.device) if rotated else None
        shape, results = (2, num_tokens + 2, groups, size), []
        doubling = 2.0 ** torch.arange(groups, device=self.device)
        given = (None, None) if scales is None else tuple(each * doubling for each in scales)
        if are_mapped:
            given += tuple(self.randn(size, size, seed=s) / size**0.5 for s in (3, 4))
        cache_dtype = cache_dtype if scales is None else FP8
        for op_set in (self.op_set, ops.reference_ops()):
            cache = torch.full(shape, math.nan, dtype=cache_dtype or self.dtype, device=self.device)
            out = op_set.rotary_write(
                q, k, v, positions, table, *norms, 1e-6, interleaved, cache, slots, *given
            )
            results.append((out, cache))
        (found, found_cache), (defined, defined_cache) = results
        self.assert_equal(found, defined, scale=8.0)
        assert torch.equal(found_cache.isnan(), defined_cache.isnan())
        if scales is not None:
            assert_neighbours(found_cache, defined_cache)
            return
        both = (cache.nan_to_num().to(self.dtype) for cache in (found_cache, defined_cache))
        self.assert_equal(*both, scale=8.0)
        assert torch.equal(joined, before)

    def embedding(self, size: int) -> None:
        """Ids of other ranks, a rank without rows, and no ids."""
        weight = self.randn(3, size)
        for integers in (torch.int32, torch.int64):
            ids = self.integers([4, 0, 6, 7, 3, 5], integers)
            for given, rows in ((ids, weight), (ids, weight[:0]), (ids[:0], weight)):
                found = self.op_set.embedding(given, rows, 4)
                assert torch.equal(found, ops.embedding(given, rows, 4))

    def build_batch(
        self, lengths: list[int], num_tokens: int, width: int, block_size: int = 16
    ) -> None:
        """Blocks as far as a request is long, and not one more; ids below 0 alone are replaced."""
        num_rows, num_requests = len(lengths) + 3, len(lengths)
        tables = torch.arange(num_rows * width, dtype=torch.int32, device=self.device)
        tables = tables.view(num_rows, width)
        table = torch.full((num_requests, width), -9, dtype=torch.int32, device=self.device)
        rows = self.integers([(2 * r + 1) % num_rows for r in range(num_requests)])
        last_ids = self.integers([1000 + r for r in range(num_rows)])
        given = [-1 - t % num_rows if t % 2 else t for t in range(num_tokens)]
        ids = self.integers(given)
        self.op_set.build_batch(
            ids, rows, self.integers(lengths), last_ids, tables, table, block_size
        )
        assert ids.tolist() == [t if t >= 0 else 999 - t for t in given]
        for request, length in enumerate(lengths):
            count = -(-length // block_size)
            assert torch.equal(table[request, :count], tables[int(rows[request]), :count])
            assert (table[request, count:] == -9).all()


def assert_neighbours(found: Tensor, defined: Tensor) -> None:
    """FP8 numbers are the same, but for a few that fall to the neighbour."""
    places = (found.cpu().view(torch.uint8), defined.cpu().view(torch.uint8))
    apart = (places[0].int() - places[1].int()).abs()
    assert int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= max(1, apart.numel() // 50)


def angles(width: int) -> Tensor:
    """A table of 50 positions for `width` rotated features."""
    turns = torch.arange(50).unsqueeze(1) * torch.logspace(0, -3, width // 2)
    return torch.stack((turns.cos(), turns.sin()), 1)
