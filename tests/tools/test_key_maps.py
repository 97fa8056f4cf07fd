"""Maps of keys and queries: the moments that they leave, and what rounding costs then."""

import math

import pytest
import torch
from torch import Tensor

from rackmount_registry.attention import FP8
from rackmount_registry.errors import RackmountError
from rackmount_tools.key_maps import Moments, best_maps

SIZES = [1, 6, 16, 80, 128]


def samples(size: int, seed: int, spread: float) -> Tensor:
    """[4096, size]: some directions far larger than others, about a mean that is not 0."""
    random = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(size, size, generator=random)).Q
    mix = (spread * torch.randn(size, generator=random)).exp().unsqueeze(1) * turn
    x = torch.randn(4096, size, generator=random) + torch.randn(size, generator=random)
    return (x @ mix).double()


def moments(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


@pytest.mark.parametrize("size", SIZES)
def test_both_have_the_same_moments_and_an_even_diagonal(size: int) -> None:
    q, k = samples(size, 1, 0.3), samples(size, 2, 0.3)
    maps = best_maps(moments(q), 3 * moments(k))
    torch.testing.assert_close(maps.q @ maps.k.T, torch.eye(size).double())
    one, other = moments(q @ maps.q), 3 * moments(k @ maps.k)
    torch.testing.assert_close(one, other)
    even = 1e-9 if size & (size - 1) == 0 else 0.5
    assert one.diagonal().std(correction=0) <= even * one.diagonal().mean()


@pytest.mark.parametrize("size", [16, 80, 128])
def test_scores_are_less_wrong_than_those_of_rotated_keys(size: int) -> None:
    q, k = samples(size, 3, 1.0), samples(size, 4, 1.0)
    maps = best_maps(moments(q), moments(k))
    random = torch.Generator().manual_seed(5)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=random).double()).Q
    mapped = noise(q @ maps.q, k @ maps.k)
    assert mapped < 0.7 * noise(q @ rotation, k @ rotation)
    assert mapped < 0.7 * noise(q, k)


def noise(q: Tensor, k: Tensor) -> float:
    """Mean squared error of scores, keys being rounded."""
    scale = k.abs().amax() / 448
    off = (k / scale).float().to(FP8).double() * scale - k
    return (q[:1024] @ off[1024:].T).pow(2).mean().item()


def test_moments_are_of_all_heads_and_tokens() -> None:
    q, k = samples(8, 6, 0.3).view(512, 8, 8), samples(8, 7, 0.3).view(-1, 2, 8)[:512]
    seen = Moments()
    for piece in (slice(0, 100), slice(100, 512)):
        seen.see(q[piece].float(), k[piece].float())
    found, wanted = seen.maps(), best_maps(moments(q.flatten(0, 1)), moments(k.flatten(0, 1)))
    one, other = (moments(k.flatten(0, 1) @ each.k) for each in (found, wanted))
    torch.testing.assert_close(one / one.trace(), other / other.trace())


def test_too_few_keys_give_no_maps() -> None:
    seen = Moments()
    for count in (0, 90, 5):
        seen.see(torch.randn(count, 4, 8), torch.randn(count, 2, 8))
    with pytest.raises(
        RackmountError, match=r"has 190 keys a layer, .* need 192 or more; give a lon"
    ):
        seen.maps()
    seen.see(torch.randn(1, 4, 8), torch.randn(1, 2, 8))
    assert seen.maps().k.isfinite().all()


@pytest.mark.parametrize("spoiled", [math.inf, math.nan])
def test_what_is_not_finite_is_left_to_whoever_looks_at_the_keys(spoiled: float) -> None:
    moment = torch.full((8, 8), spoiled, dtype=torch.float64)
    maps = best_maps(torch.eye(8).double(), moment)
    assert torch.equal(maps.q, torch.eye(8)) and torch.equal(maps.k, torch.eye(8))


def test_keys_of_few_directions_or_none_leave_maps_that_can_be_undone() -> None:
    q, k = samples(8, 8, 0.3), samples(8, 9, 0.3)
    flat = k.clone()
    flat[:, 3:] = 0
    for given in (flat, torch.zeros_like(k)):
        maps = best_maps(moments(q), moments(given))
        torch.testing.assert_close(maps.q @ maps.k.T, torch.eye(8).double())
        assert maps.q.isfinite().all() and maps.q.abs().amax() < 1e3
