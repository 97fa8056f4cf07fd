"""Maps of queries and keys under which rounding the keys changes scores least.

A key k that is rounded to float8_e4m3fn is off by a share of each of its numbers, so the score q.k
is off by about that share of the root of the sum of (q_i k_i)^2. Of all q A^-T and k A, whose
scores are those of q and k, that sum is least on average where both have the same second moments S,
and S has an even diagonal: it is trace(S)^2 / D then. With Q and K the second moments of q and k, G
their geometric mean Q # K^-1, and E the eigenvectors of S = G^1/2 K G^1/2, that is

    A = G^1/2 E H,    H a Hadamard matrix / sqrt(D),

where q and k are taken to be independent. A rotation alone (SpinQuant's R3, arXiv 2405.16406) evens
out the diagonals, and leaves the moments.
"""

import math

import torch
from torch import Tensor

from rackmount_registry.attention import KeyMaps
from rackmount_registry.errors import RackmountError

LEAST_KEYS = 24
"""Keys for each of their features. With 12 maps did SmolLM2 harm, with 24 they paid."""
FLOOR = 1e-6
"""Least moment of a direction, of the largest: other text may know what this one lacks."""


class Moments:
    """Second moments of one layer's queries and keys, over all heads and tokens: float64 [D, D]."""

    def __init__(self) -> None:
        self._q = self._k = torch.zeros(())
        self._num_keys = 0

    def see(self, q: Tensor, k: Tensor) -> None:
        """Takes q [T, H, D] and k [T, G, D] into account, turned and normed."""
        self._num_keys += k.shape[0] * k.shape[1]
        self._q, self._k = _moments(q) + self._q.to(q.device), _moments(k) + self._k.to(k.device)

    def maps(self) -> KeyMaps:
        """float64 [D, D]; identities where there is nothing to go by.

        Raises:
            RackmountError: too few keys were seen.
        """
        least = LEAST_KEYS * self._k.shape[-1] if self._num_keys else LEAST_KEYS
        if self._num_keys < least:
            raise RackmountError(
                f"the data has {self._num_keys} keys a layer, tokens times KV heads, and maps need "
                f"{least} or more; give a longer text, or take more tokens of it"
            )
        return best_maps(self._q, self._k)


def best_maps(q: Tensor, k: Tensor) -> KeyMaps:
    """The maps for second moments q and k, float64 [D, D], of any scale; identities for zeros, or
    for what is not finite."""
    if not 0 < q.trace() < math.inf or not 0 < k.trace() < math.inf:
        same = torch.eye(len(q), dtype=q.dtype, device=q.device)
        return KeyMaps(q=same, k=same)
    q, k = _power(q, 1, FLOOR), _power(k, 1, FLOOR)
    root = _power(q, 0.5)
    mean = root @ _power(root @ k @ root, -0.5) @ root
    half = _power(mean, 0.5)
    vectors = torch.linalg.eigh(half @ k @ half).eigenvectors
    matrix = half @ vectors @ _mixing(len(q)).to(q)
    return KeyMaps(q=torch.linalg.inv(matrix).T, k=matrix)


def _moments(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1).double()
    return flat.T @ flat


def _power(x: Tensor, exponent: float, floor: float = 0) -> Tensor:
    """Of a symmetric matrix, with eigenvalues of `floor` times the largest or more."""
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.clamp_min(floor * values.amax()).pow(exponent)) @ vectors.T


def _mixing(size: int) -> Tensor:
    """Orthogonal [size, size]: spreads each of rising eigenvalues over as many features as the
    largest power of two in `size`, and gives each of these about as much."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while size % (2 * len(hadamard)) == 0:
        hadamard = torch.cat(
            (torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))
        )
    num_parts = size // len(hadamard)
    dealt = torch.arange(size).view(len(hadamard), num_parts)
    dealt[1::2] = dealt[1::2].flip(1)
    mixed = torch.zeros(size, size, dtype=torch.float64)
    for part in range(num_parts):
        columns = slice(part * len(hadamard), (part + 1) * len(hadamard))
        mixed[dealt[:, part], columns] = hadamard / len(hadamard) ** 0.5
    return mixed
