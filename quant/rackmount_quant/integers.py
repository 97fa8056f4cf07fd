"""Stored formats of compressed-tensors' integer weights: packed into words, or a byte each.

| tensor | packed | in bytes |
| --- | --- | --- |
| `weight_packed` | int32 [out, in * bits / 32]: values + 2^(bits - 1), lowest bits first | |
| `weight` | | int8 [out, in] |
| `weight_scale` | [out, groups]; by channel [out, 1]; by tensor [1] | the same |
| `weight_zero_point` | int32 [out * bits / 32, groups] as values | int8, as scales |
| `weight_shape` | int64 [2] | |
| `weight_g_idx` | int32 [in]: the group of each column | the same |

Zero points are there where a weight is asymmetric; one for a whole tensor is never packed. Groups
of columns are there with act-order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rackmount_quant.eight_bits import MATRIX, unit_inputs
from rackmount_quant.grouped import group_bytes, group_weight
from rackmount_quant.packing import fields_per_word, midpoint, pack, unpack, unpack_parts
from rackmount_quant.rounding import round_groups
from rackmount_registry.errors import CheckpointError
from rackmount_registry.formats import Dim, Slot, StoredFormat, Weight


@dataclass(frozen=True, kw_only=True)
class Integers:
    """How compressed-tensors stores a weight of integers."""

    bits: int
    per: Literal["tensor", "channel", "group"]
    group: int = -1
    """Columns that share a scale; -1: all."""
    symmetric: bool = True
    act_order: bool = False
    packed: bool = True


def integer_format(
    kind: Integers, shape: tuple[int, int], ignored: tuple[Slot, ...] = ()
) -> StoredFormat:
    """The format of a weight.

    Args:
        shape: [out, in], of all ranks together.
        ignored: tensors of a checkpoint that say how inputs are rounded, which they are not.
    """
    per, groups = fields_per_word(kind.bits), _groups(kind, shape[1])
    scales = (Dim("part"),) if kind.per == "tensor" else (Dim("out"), groups)
    slots = [Slot("weight_scale", scales, "float32"), *ignored]
    if kind.packed:
        slots.append(Slot("weight_packed", (Dim("out"), Dim("in", per)), "int32"))
        slots.append(Slot("weight_shape", (Dim("part"), Dim("fixed", 2)), "int64", optional=True))
    else:
        slots.append(Slot("weight", MATRIX, "int8"))
    if not kind.symmetric and kind.packed and kind.per != "tensor":
        slots.append(Slot("weight_zero_point", (Dim("out", per), groups), "int32"))
    elif not kind.symmetric:
        slots.append(Slot("weight_zero_point", scales, "int8"))
    if kind.act_order:
        slots.append(Slot("weight_g_idx", (Dim("part"), Dim("in")), "int32"))
    symmetry = "" if kind.symmetric else ", asymmetric"
    order = ", act-order" if kind.act_order else ""
    return StoredFormat(
        f"int{kind.bits} by {kind.per} {kind.group}{symmetry}{order}".replace(" -1", ""),
        tuple(slots),
        f"int{kind.bits}_groups",
        partial(_finish, kind, shape),
        partial(_encode, kind, ignored),
        held_bytes=group_bytes(kind.bits, kind.group),
    )


def _groups(kind: Integers, in_features: int) -> Dim:
    """With act-order any rank's columns may be in any group, so each has all scales."""
    if kind.group == -1:
        return Dim("fixed")
    return Dim("fixed", in_features // kind.group) if kind.act_order else Dim("in", kind.group)


def _finish(
    kind: Integers,
    whole: tuple[int, int],
    tensors: Mapping[str, Tensor],
    parts: tuple[int, ...],
    in_features: int,
) -> Weight:
    bits = kind.bits
    if kind.packed:
        _check_shape(tensors.get("weight_shape"), whole, parts)
        values = tensors["weight_packed"]
        values = values if bits == 4 else unpack(values, bits)[..., :in_features]
    else:
        values = _unsigned(tensors["weight"], bits)
        values = pack(values, bits) if bits == 4 else values
    scales, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int8:
        zeros = _unsigned(zeros, bits)
    elif zeros is not None:
        zeros = unpack_parts(zeros.mT, parts, bits).mT
    if kind.per == "tensor":
        rows = torch.tensor(parts, device=scales.device)
        scales = scales.repeat_interleave(rows, -1).unsqueeze(-1)
        zeros = None if zeros is None else zeros.repeat_interleave(rows, -1).unsqueeze(-1)
    return group_weight(
        values,
        scales,
        zeros,
        bits=bits,
        group=kind.group,
        parts=parts,
        in_features=in_features,
        groups=tensors.get("weight_g_idx"),
    )


def _check_shape(shape: Tensor | None, whole: tuple[int, int], parts: tuple[int, ...]) -> None:
    """Words are whole, so that a packed tensor's own shape leaves the number of columns open. The
    first part has the rows of `whole`. Others have those of this rank, as often as ranks cut them,
    which is no more often than the first part; a vocabulary, which ranks may cut unevenly, is a
    first part."""
    if shape is None:
        return
    here, most = torch.tensor(parts, device=shape.device), whole[0] // max(1, parts[0])
    rows, columns = shape.reshape(-1, len(parts), 2).unbind(-1)
    if bool((columns != whole[1]).any()):
        raise CheckpointError(
            f"weight_shape has {_distinct(columns)} columns, and the model needs {whole[1]}"
        )
    if bool((rows[:, 0] != whole[0]).any()):
        raise CheckpointError(
            f"weight_shape has {_distinct(rows[:, 0])} rows, and the model needs {whole[0]}"
        )
    rows, here = rows[:, 1:], here[1:]
    if bool(((rows % here != 0) | (rows < here) | (rows > here * most)).any()):
        times = f", or up to {most} times that" if most > 1 else ""
        raise CheckpointError(
            f"weight_shape has {_distinct(rows)} rows, and the model needs {here.tolist()}{times}"
        )


def _distinct(numbers: Tensor) -> list[int]:
    return sorted(set(numbers.flatten().tolist()))


def _unsigned(values: Tensor, bits: int) -> Tensor:
    """uint8 from 0 on, of int8 around 0."""
    shifted = values.view(torch.uint8) + midpoint(bits)
    if bits == 4 and shifted.numel() and int(shifted.max()) > 15:
        raise CheckpointError("values of 4 bits must be from -8 to 7, and are not")
    return shifted


def _encode(kind: Integers, ignored: tuple[Slot, ...], dense: Tensor) -> dict[str, Tensor]:
    out, size = dense.shape
    dtype = torch.float32 if dense.dtype == torch.float64 else dense.dtype
    flat = dense.reshape(1, -1) if kind.per == "tensor" else dense
    group = kind.group if kind.per == "group" else flat.shape[1]
    values, scales, zeros = round_groups(
        flat, kind.bits, group, symmetric=kind.symmetric, dtype=dtype
    )
    values = values.view(out, size)
    tensors = {"weight_scale": scales} | unit_inputs(ignored, dense)
    if kind.packed:
        tensors["weight_packed"] = pack(values, kind.bits)
        tensors["weight_shape"] = torch.tensor([out, size], device=dense.device)
    else:
        tensors["weight"] = _signed(values, kind.bits)
    if not kind.symmetric:
        packed = kind.packed and kind.per != "tensor"
        tensors["weight_zero_point"] = (
            pack(zeros.mT, kind.bits).mT.contiguous() if packed else _signed(zeros, kind.bits)
        )
    if kind.act_order:
        tensors["weight_g_idx"] = (torch.arange(size, device=dense.device) // group).int()
    return tensors


def _signed(values: Tensor, bits: int) -> Tensor:
    """int8 around 0, of uint8 from 0 on."""
    return (values - midpoint(bits)).view(torch.int8)
