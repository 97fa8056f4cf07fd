"""The random numbers: frozen, equal to their definition in plain integers, and random."""

import math
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rackmount_registry.sampling.random import child_seed, exponential_noise, random_bits, row_keys

M32, M64 = 2**32 - 1, 2**64 - 1

GOLDEN_KEYS = ["0xa706dd2f4d197e6f", "0x86d6fd953217ae03", "0x7abd981f20c05161"]
GOLDEN_BITS = [
    [2047213013, 2129307674, 2534489455, 324042768],
    [1043869139, 4040936298, 3565788955, 3857425152],
    [2490128801, 2315744512, 1327045661, 4055627773],
]
GOLDEN_NOISE = [[0.6475123167037964, 0.6847189664840698, 0.8918585777282715, 0.07844498753547668]]


def plain_splitmix64(z: int) -> int:
    z = z + 0x9E3779B97F4A7C15 & M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def plain_mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & M32
    x = (x ^ x >> 15) * 0x846CA68B & M32
    return x ^ x >> 16


def unmix(x: int) -> int:
    x = x ^ x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) & M32
    x = x ^ x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) & M32
    return x ^ x >> 16


def plain_bits(key: int, index: int) -> int:
    return plain_mix(plain_mix(index) * (key >> 32 | 1) + key & M32)


def held(keys: list[int] | np.ndarray) -> Tensor:
    """u64 as int64."""
    return torch.from_numpy(np.asarray(keys, np.uint64).view(np.int64))


def bits(seeds: list[int] | np.ndarray, positions: list[int] | np.ndarray, ids: Tensor) -> Tensor:
    return random_bits(row_keys(held(seeds), torch.as_tensor(positions)), ids)


def chi_square_z(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """Standard score of a chi-square statistic, by Wilson and Hilferty's cube root."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    degrees = observed.size - 1
    spread = 2 / (9 * degrees)
    root: float = (statistic / degrees) ** (1 / 3)
    return (root - (1 - spread)) / math.sqrt(spread)


def test_the_values_are_frozen() -> None:
    keys = row_keys(held([0, 1, M64]), torch.tensor([0, 1, 131071]))
    assert [hex(key & M64) for key in keys.tolist()] == GOLDEN_KEYS
    ids = torch.tensor([0, 1, 49151, 2**20])
    assert random_bits(keys, ids).tolist() == GOLDEN_BITS
    noise = exponential_noise(keys[:1], ids)
    torch.testing.assert_close(noise, torch.tensor(GOLDEN_NOISE), rtol=1e-6, atol=0)


@given(
    seed=st.integers(0, M64),
    position=st.integers(0, 2**31 - 1),
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9),
)
def test_the_bits_are_their_definition(seed: int, position: int, ids: list[int]) -> None:
    key = plain_splitmix64(plain_splitmix64(seed) + position & M64)
    expected = [plain_bits(key, index) for index in ids]
    assert bits([seed], [position], torch.tensor(ids)).tolist() == [expected]


def test_noise_is_finite_and_positive_at_both_ends_of_the_bits() -> None:
    for h in (0, 1, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 1):
        key = held([unmix(h) - plain_mix(7) & M32])  # high word 0: a factor of 1
        ids = torch.tensor([7])
        assert random_bits(key, ids).tolist() == [[h]]
        noise = float(exponential_noise(key, ids))
        v = min((h + 0.5) * 2.0**-32, 1 - 2.0**-24)
        assert 2.0**-34 < noise < 17
        assert math.isclose(noise, -math.log1p(-v), rel_tol=1e-2 if h > 2**31 else 1e-6)


def test_a_vocabulary_index_has_its_number_whatever_else_is_asked() -> None:
    ids = torch.arange(5000)
    whole = bits([3, 4], [10, 11], ids)
    chosen = torch.tensor([[4999, 0, 17], [17, 2, 1]])
    assert torch.equal(bits([3, 4], [10, 11], chosen), whole.gather(1, chosen))
    assert torch.equal(bits([4], [11], ids)[0], whole[1])
    keys = row_keys(held([3, 4]), torch.tensor([10, 11]))
    noise = exponential_noise(keys, ids)
    assert torch.equal(exponential_noise(keys, chosen), noise.gather(1, chosen))


SEQUENCES: dict[str, Callable[[int], Tensor]] = {
    "indices": lambda n: bits([7], [3], torch.arange(n))[0],
    "positions": lambda n: bits(np.full(n, 7), np.arange(n), torch.tensor([5]))[:, 0],
    "seeds": lambda n: bits(np.arange(n), np.full(n, 3), torch.tensor([5]))[:, 0],
}


def test_the_bits_are_uniform_along_indices_positions_and_seeds() -> None:
    for name, sequence in SEQUENCES.items():
        h = sequence(2**16).numpy()
        for shift in (0, 8, 16, 24):
            counts = np.bincount(h >> shift & 0xFF, minlength=256)
            assert abs(chi_square_z(counts, 2**16 / 256)) < 4, (name, shift)


def test_neighbours_are_independent_along_indices_positions_and_seeds() -> None:
    for name, sequence in SEQUENCES.items():
        h = sequence(2**16 + 64).numpy()
        for step in (1, 2, 64):
            first, second = h[: 2**16], h[step : 2**16 + step]
            for shift in (0, 28):
                pairs = (first >> shift & 15) * 16 + (second >> shift & 15)
                counts = np.bincount(pairs, minlength=256)
                assert abs(chi_square_z(counts, 2**16 / 256)) < 4, (name, step, shift)


def test_rows_are_uncorrelated() -> None:
    ids = torch.arange(2**14)
    rows = bits(np.arange(16) // 4, np.arange(16) % 4, ids).numpy()
    correlation = np.corrcoef(rows) - np.eye(16)
    assert np.abs(correlation).max() * math.sqrt(2**14) < 4.5


def test_the_noise_is_exponential() -> None:
    noise = exponential_noise(held([123456789]), torch.arange(2**16)).numpy()[0]
    edges = -np.log1p(-np.linspace(0, 1, 65)[:-1])
    counts = np.bincount(np.searchsorted(edges, noise, side="right") - 1, minlength=64)
    assert abs(chi_square_z(counts, 2**10)) < 4


def test_the_answers_of_one_request_have_seeds_of_their_own() -> None:
    seeds = [child_seed(seed, index) for seed in range(8) for index in range(8)]
    assert len(set(seeds)) == 64
    assert [child_seed(seed, 0) for seed in range(8)] == list(range(8))
    assert all(0 <= seed < 2**64 for seed in seeds)
