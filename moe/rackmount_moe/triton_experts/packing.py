"""Weights as the kernels read them: dense ones as they are, others repacked once.

Columns of a quantized weight are cut into blocks of `block_k`, which share a scale, and a block's
rows lie one behind the other: what a program reads at a time is in one piece. Within a row and
block the words are ordered as `rackmount_registry.device.unpack` says.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rackmount_registry.device.unpack import interleave, pack_nibbles
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import BLOCK, Weight, unpack_int4

Code = Literal["dense", "int4", "int8", "fp8"]
CODES: dict[str, Code] = {
    "dense": "dense",
    "fp8_rows": "fp8",
    "fp8_blocks": "fp8",
    "int4_groups": "int4",
    "int8_groups": "int8",
}
"""Weight format -> how values are stored; the formats that are taken."""
MAX_BLOCK_K = 128
MIN_BLOCK_K = 32
"""Sixteen bytes of four bits."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A bundle of E weights [N, K]."""

    format: str
    code: Code
    values: Tensor
    """[E, N, K] as loaded for "dense"; else int32 [E, blocks, N, words]."""
    rows: int
    """N."""
    columns: int
    """K, stored ones: with `order` not what the weight takes in."""
    block_k: int = 0
    """Columns of a block; 0 where any may be cut."""
    group: int = 0
    """Columns that share a scale, whole blocks of them; 0: all, or there are no scales."""
    scales: Tensor | None = None
    """[E, rows, groups], or block rows for "fp8_blocks"."""
    zeros: Tensor | None = None
    """float32 [E, rows, groups]: the stored value that stands for 0; None: as `unpack` has it."""
    order: Tensor | None = None
    """int32 [E, columns, padded to whole blocks]: the input of each stored column, -1 for none."""

    @property
    def groups(self) -> int:
        return 1 if self.scales is None else self.scales.shape[2]


def pack(weight: Weight) -> Packed:
    """A bundle's weight for the kernels.

    Raises:
        ConfigError: groups that are not made of blocks that the kernels can take.
    """
    code, rows = CODES[weight.format], weight.out_features
    if code == "dense":
        dense = weight.tensors["weight"]
        return Packed(
            format=weight.format, code=code, values=dense, rows=rows, columns=dense.shape[-1]
        )
    order, zeros = weight.tensors.get("order"), weight.tensors.get("zeros")
    columns = weight.in_features if order is None else order.shape[-1]
    scales = weight.tensors["scales"]
    if weight.format == "fp8_rows":
        scales = scales.unsqueeze(-1)
    group = BLOCK if weight.format == "fp8_blocks" else weight.group
    if scales.shape[-1] == 1:
        group = 0
    block_k = _block_of(group)
    if zeros is not None:
        zeros = (zeros.float() - (128 if code == "int8" else 0)).contiguous()
    return Packed(
        format=weight.format,
        code=code,
        values=_pack_values(weight.tensors["values"], code, columns, block_k),
        rows=rows,
        columns=columns,
        block_k=block_k,
        group=group,
        scales=scales.contiguous(),
        zeros=zeros,
        order=None if order is None else _pad(order, block_k, -1).contiguous(),
    )


def _block_of(group: int) -> int:
    """The widest block that divides a group; 0 is a group of all columns."""
    block_k = MAX_BLOCK_K
    while group % block_k:
        block_k //= 2
    if block_k < MIN_BLOCK_K:
        raise ConfigError(
            f"group={group} does not fit expert kernel triton; it must be a multiple of "
            f"{MIN_BLOCK_K}, or hold all columns"
        )
    return block_k


def _pack_values(values: Tensor, code: Code, columns: int, block_k: int) -> Tensor:
    """int32 [E, blocks, N, words] of values [E, N, ...] as their format stores them; an expert at a
    time, since unpacked they are several times as large."""
    bits = 4 if code == "int4" else 8
    shape = len(values), -(-columns // block_k), values.shape[1], block_k * bits // 32
    packed = values.new_empty(shape, dtype=torch.int32)
    for stored, target in zip(values, packed, strict=True):
        plain = unpack_int4(stored) if code == "int4" else stored.view(torch.uint8)
        if code == "int8":
            plain = plain ^ 128  # signed: less 128
        ordered = interleave(_pad(plain[:, :columns], block_k, 0), bits).contiguous()
        words = pack_nibbles(ordered) if code == "int4" else ordered.view(torch.int32)
        target.copy_(words.unflatten(-1, (shape[1], shape[3])).transpose(0, 1))
    return packed


def _pad(tensor: Tensor, multiple: int, value: int) -> Tensor:
    """The last dimension up to a multiple."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % multiple), value=value)
