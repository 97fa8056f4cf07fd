"""Weights of 4 or 8 bits whose columns share scales by groups: what AWQ, GPTQ and the integers of
compressed-tensors end in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rackmount_quant.packing import midpoint, pack, unpack
from rackmount_registry.errors import CheckpointError
from rackmount_registry.formats import Weight
from rackmount_registry.scales import check_scales

PADDED_GROUP = 16
"""Columns of a group where those of a rank do not fill the checkpoint's groups: 16-bit matrix
units take as many at a time."""


def group_bytes(bits: int, group: int) -> Callable[[int, int], int]:
    """`StoredFormat.held_bytes` of what `group_weight` gives, at least: with scales of 16 bits,
    columns in order, and all zero points in the middle."""

    def held(rows: int, columns: int) -> int:
        values = 4 * -(-columns // 8) if bits == 4 else columns
        groups = 1 if group == -1 else -(-columns // group)
        return rows * (values + 2 * groups)

    return held


def group_weight(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group: int,
    parts: tuple[int, ...],
    in_features: int,
    groups: Tensor | None = None,
) -> Weight:
    """A `Weight` of the format "int4_groups" or "int8_groups".

    Args:
        values: as these formats store them, columns in the checkpoint's order.
        scales: float32 [..., out, G].
        zeros: uint8 [..., out, G]; None: the middle.
        group: columns that share a scale; -1: all of them.
        groups: int32 [..., parts, in], the group of each column: "act-order". None: they are in
            order. Columns are sorted by it once, here; where those of a rank do not fill whole
            groups, each is filled up to a multiple of 16.

    Raises:
        CheckpointError: scales that are 0 or not finite, columns in groups that do not exist, or
            parts whose columns are in different groups.
    """
    # A negative scale is legal: some quantizers give the most negative integer to either sign.
    check_scales(scales.abs(), "magnitudes of weight scales")
    if zeros is not None and bool((zeros == midpoint(bits)).all()):
        zeros = None
    size = in_features if group == -1 else group
    tensors: dict[str, Tensor] = {}
    if groups is not None:
        columns = sort_columns(_common(groups), size, scales.shape[-1])
        size, scales = columns.size, columns.pick_groups(scales)
        zeros = None if zeros is None else columns.pick_groups(zeros)
        if columns.order is not None:
            tensors["order"] = columns.order
            fields = unpack(values, 4) if bits == 4 else values
            fields = _pick(fields, columns.order.clamp(min=0))
            values = pack(fields, 4) if bits == 4 else fields
    tensors |= {"values": values.contiguous(), "scales": narrow(scales).contiguous()}
    if zeros is not None:
        tensors["zeros"] = zeros.contiguous()
    return Weight(f"int{bits}_groups", tensors, parts, in_features, size)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns sorted so that each `size` of them share a scale."""

    order: Tensor | None
    """int32 [..., S]: the column that stands at a place, or -1; None: as they were."""
    groups: Tensor
    """int64 [..., ceil(S / size)]: the checkpoint's group of each `size` columns."""
    size: int

    def pick_groups(self, each: Tensor) -> Tensor:
        """[..., out, G] of the checkpoint's groups -> [..., out, G'] of these."""
        return _pick(each, self.groups)


def sort_columns(groups: Tensor, size: int, num_groups: int) -> Columns:
    """Sorts columns by their group.

    Args:
        groups: int32 [..., in].
        size: columns of a group in the checkpoint.
        num_groups: groups that there are.

    Raises:
        CheckpointError: a group below 0 or not below `num_groups`.
    """
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise CheckpointError(
            f"groups of columns must be from 0 to {num_groups - 1}, and are from "
            f"{int(groups.min())} to {int(groups.max())}"
        )
    ids, order = torch.sort(groups.long(), dim=-1, stable=True)
    firsts = ids[..., ::size]
    if not torch.equal(firsts.repeat_interleave(size, -1)[..., : ids.shape[-1]], ids):
        return _fill_up(ids, order, num_groups)
    in_place = torch.arange(order.shape[-1], device=order.device)
    is_sorted = torch.equal(order, in_place.expand_as(order))
    return Columns(order=None if is_sorted else order.int(), groups=firsts, size=size)


def _fill_up(ids: Tensor, order: Tensor, num_groups: int) -> Columns:
    """Sorted columns [..., in], each group filled up with padding to a multiple of 16."""
    counts = ids.new_zeros(*ids.shape[:-1], num_groups).scatter_add_(-1, ids, torch.ones_like(ids))
    rooms = (counts + PADDED_GROUP - 1) // PADDED_GROUP * PADDED_GROUP
    ends = rooms.cumsum(-1)
    shift = (ends - rooms) - (counts.cumsum(-1) - counts)
    where = torch.arange(ids.shape[-1], device=ids.device) + shift.gather(-1, ids)
    total = int(ends[..., -1].max())
    padded = order.new_full((*ids.shape[:-1], total), -1).scatter_(-1, where, order)
    groups = ids.new_zeros(*ids.shape[:-1], total // PADDED_GROUP)
    groups.scatter_(-1, where // PADDED_GROUP, ids)
    return Columns(order=padded.int(), groups=groups, size=PADDED_GROUP)


def narrow(scales: Tensor) -> Tensor:
    """Float32 scales in the first of float16, bfloat16 and float32 that holds all of them."""
    for dtype in (torch.float16, torch.bfloat16):
        short = scales.to(dtype)
        if torch.equal(short.float(), scales):
            return short
    return scales


def _common(groups: Tensor) -> Tensor:
    """[..., parts, in] -> [..., in]: one order serves all parts of a fused projection."""
    first = groups[..., :1, :]
    if not torch.equal(first.expand_as(groups), groups):
        raise CheckpointError(
            "projections of one input must have their columns in the same groups, and have not"
        )
    return first.squeeze(-2)


def _pick(each: Tensor, where: Tensor) -> Tensor:
    """Entries `where` [..., n] along the last dimension of [..., out, m]."""
    index = where.long().unsqueeze(-2)
    return each.gather(-1, index.expand(*each.shape[:-1], index.shape[-1]))
