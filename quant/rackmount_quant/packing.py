"""Unsigned integers of 4 and 8 bits, packed into 32-bit words, the first in the lowest bits."""

from collections.abc import Sequence

import torch
from torch import Tensor


def fields_per_word(bits: int) -> int:
    """How many integers of `bits` a word holds."""
    return 32 // bits


def midpoint(bits: int) -> int:
    """The zero point of unsigned integers that stand for symmetric ones."""
    return 1 << (bits - 1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 [..., n * 32 / bits] from int32 words [..., n]; of 8 bits a view, if it can."""
    octets = _reinterpreted(words, torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def pack(fields: Tensor, bits: int) -> Tensor:
    """int32 words [..., ceil(n * bits / 32)] from uint8 fields [..., n], the last word filled up
    with zeros."""
    if short := -fields.shape[-1] % fields_per_word(bits):
        fields = torch.nn.functional.pad(fields, (0, short))
    octets = fields if bits == 8 else fields[..., ::2] | fields[..., 1::2] << 4
    return _reinterpreted(octets, torch.int32)


def _reinterpreted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of the last dimension as another type. They are flattened on the way: torch wants a
    stride of 1 even where there is nothing to step over."""
    size = tensor.shape[-1] * tensor.element_size() // dtype.itemsize
    return tensor.contiguous().view(-1).view(dtype).view(*tensor.shape[:-1], size)


def unpack_parts(words: Tensor, parts: Sequence[int], bits: int) -> Tensor:
    """uint8 [..., sum of parts] from words in which each of `parts` begins a word of its own, as
    fused projections do where rows are packed."""
    fields = unpack(words, bits)
    per = fields_per_word(bits)
    if not any(part % per for part in parts):
        return fields
    padded = fields.split([-(-part // per) * per for part in parts], -1)
    return torch.cat([each[..., :part] for each, part in zip(padded, parts, strict=True)], -1)
