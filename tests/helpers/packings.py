"""Random quantized weights, packed by the definitions of their formats, field by field: slow, and
independent of the code under test."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Row that stands in each field of a word."""


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A weight (values - zeros) * scales, with a group for each column."""

    values: Tensor
    """int64 [out, in] from 0 on."""
    zeros: Tensor
    """int64 [out, G]."""
    scales: Tensor
    """float16 [out, G]."""
    groups: Tensor
    """int64 [in]."""
    bits: int

    @property
    def dense(self) -> Tensor:
        """float32 [out, in]: exact, as a float16 scale leaves room for the integer."""
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups].float()
        return (self.values - zeros).float() * scales


def random_grouped(
    out: int,
    size: int,
    *,
    bits: int = 4,
    group: int = -1,
    symmetric: bool = False,
    act_order: bool = False,
    groups: Tensor | None = None,
    seed: int = 0,
    scale: float = 0.02,
) -> Grouped:
    """Scales are from `scale` / 2 to `scale` * 3 / 2, less for 8 bits; values use all of their
    range. `groups` are those of another weight, which has its columns in them."""
    random = torch.Generator().manual_seed(seed)
    width = size if group == -1 else group
    if groups is None:
        groups = torch.arange(size) // width
        if act_order:
            groups = groups[torch.randperm(size, generator=random)]
    shape = (out, -(-size // width))
    zeros = torch.randint(1 << bits, shape, generator=random)
    return Grouped(
        values=torch.randint(1 << bits, (out, size), generator=random),
        zeros=torch.full(shape, 1 << (bits - 1)) if symmetric else zeros,
        scales=((torch.rand(shape, generator=random) + 0.5) * scale / 2 ** (bits - 4)).half(),
        groups=groups,
        bits=bits,
    )


def words(fields: Sequence[int], bits: int) -> list[int]:
    """Signed 32-bit words with the first field in the lowest bits; the last one may be short."""
    per, packed = 32 // bits, []
    for start in range(0, len(fields), per):
        word = sum(field << bits * at for at, field in enumerate(fields[start : start + per]))
        packed.append(word - (word >> 31 << 32))
    return packed


def words_of_rows(fields: Tensor, bits: int) -> Tensor:
    """int32 [n, ceil(m * bits / 32)] of fields [n, m]."""
    return torch.tensor([words(row.tolist(), bits) for row in fields], dtype=torch.int32)


def awq_tensors(weight: Grouped) -> dict[str, Tensor]:
    """As AutoAWQ stores it in the version "gemm"."""

    def packed(rows: Tensor) -> Tensor:
        columns = rows.T.reshape(rows.shape[1], -1, 8)[:, :, list(AWQ_ROWS)]
        return words_of_rows(columns.reshape(rows.shape[1], -1), 4)

    return {
        "qweight": packed(weight.values),
        "qzeros": packed(weight.zeros),
        "scales": weight.scales.T.contiguous(),
    }


def gptq_tensors(weight: Grouped, *, v2: bool = False) -> dict[str, Tensor]:
    """As AutoGPTQ stores it, or with zero points as they are."""
    bits = weight.bits
    zeros = weight.zeros.T if v2 else (weight.zeros.T - 1) % (1 << bits)
    return {
        "qweight": words_of_rows(weight.values, bits).T.contiguous(),
        "qzeros": words_of_rows(zeros, bits),
        "scales": weight.scales.T.contiguous(),
        "g_idx": weight.groups.int(),
    }


def compressed_tensors(
    weight: Grouped, *, packed: bool = True, symmetric: bool = False, act_order: bool = False
) -> dict[str, Tensor]:
    """As compressed-tensors stores it, in words or in bytes."""
    bits, middle = weight.bits, 1 << (weight.bits - 1)
    tensors = {"weight_scale": weight.scales}
    if packed:
        tensors["weight_packed"] = words_of_rows(weight.values, bits)
        tensors["weight_shape"] = torch.tensor(weight.values.shape)
    else:
        tensors["weight"] = (weight.values - middle).to(torch.int8)
    if not symmetric and packed:
        tensors["weight_zero_point"] = words_of_rows(weight.zeros.T, bits).T.contiguous()
    elif not symmetric:
        tensors["weight_zero_point"] = (weight.zeros - middle).to(torch.int8)
    if act_order:
        tensors["weight_g_idx"] = weight.groups.int()
    return tensors
