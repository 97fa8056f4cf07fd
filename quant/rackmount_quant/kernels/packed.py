"""A quantized weight as the kernels read it: words whose values need not change threads."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry.device.unpack import interleave, pack_nibbles
from rackmount_registry.formats import BLOCK, Weight, unpack_int4

PANELS = (128, 64, 32)
"""Columns of a panel of 4-bit words, widest first: what the kernel reads of a row at a time."""
MOST_SPREAD = 2.0**64
"""A row's largest scale over its smallest is less, so that inputs below 2^40 give sums that float32
holds in any group's units. Of scales in float16 that is 2^40 at most."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A weight [n, k] in words of int32; see `rackmount_registry.device.unpack` for their bits."""

    format: Literal["int4", "int8", "fp8"]
    words: Tensor
    """[rows, words of a row]; of four bits by panels, [panels, rows, words of a panel], see
    `panels`."""
    scales: Tensor
    """[rows / rows_per_scale, groups of columns], or [rows] where a row has one scale."""
    zeros: Tensor | None
    """int16 as `scales`: wider than they need be, since Triton gives the operand of the MMA, which
    they may become part of, another layout where bytes are read. None: the middle value."""
    order: Tensor | None
    """int32 [k]: the input that a column is multiplied with, -1 for none; None: in order."""
    n: int
    k: int
    group: int
    """Columns that share a scale; 0: all of them."""
    rows_per_scale: int = 1
    ratios: Tensor | None = None
    """Of columns in groups float32 [groups, rows / rows_per_scale]: a group's scale times this is
    that of the group before; 1 for the first. None where there is one group. Four bits in groups of
    128 take 6 % more memory with them."""
    far: bool = False
    """Scales of a row lie so far apart that sums in one group's units could overflow in another's:
    the weight has no products of few rows."""

    @property
    def per_word(self) -> int:
        """Values in a word."""
        return 8 if self.format == "int4" else 4

    @property
    def panel(self) -> int | None:
        """Columns of a panel; None: a row is in one piece."""
        return self.words.shape[2] * self.per_word if self.words.dim() == 3 else None

    def strides(self, block_k: int) -> tuple[int, int]:
        """Words from a row to the next, and from a block of columns to the next."""
        if self.words.dim() == 3:
            assert block_k == self.panel
            return self.words.stride(1), self.words.stride(0)
        return self.words.stride(0), block_k // self.per_word

    @property
    def kind(self) -> str:
        """What tables of tilings tell apart beside the shape."""
        return f"{self.format}/{self.group or 'rows'}"


def pack_groups(weight: Weight) -> Packed:
    """From "int4_groups" or "int8_groups". A weight with one group has one scale a row."""
    values, scales, zeros = (weight.tensors.get(key) for key in ("values", "scales", "zeros"))
    order = weight.tensors.get("order")
    assert values is not None and scales is not None
    k = weight.in_features if order is None else len(order)
    group = weight.group
    if scales.shape[-1] == 1:
        group = 0 if zeros is None else k + -k % BLOCK
    if weight.format == "int4_groups":
        panel = next((each for each in PANELS if group % each == 0), PANELS[-1])
        words = panels(values, k, panel)
    else:
        # Signed from here on: 128 less.
        words = _bytes(values[:, :k] ^ 0x80)
        zeros = None if zeros is None else zeros.to(torch.int16) - 128
    return Packed(
        format="int4" if weight.format == "int4_groups" else "int8",
        words=words,
        scales=scales.contiguous() if group else scales[:, 0].float(),
        zeros=None if zeros is None else zeros.to(torch.int16).contiguous(),
        order=order,
        n=weight.out_features,
        k=k,
        group=group,
        ratios=_ratios(scales),
        far=_far(scales),
    )


def pack_rows(weight: Weight) -> Packed:
    """From "int8_rows" or "fp8_rows"."""
    return Packed(
        format="int8" if weight.format == "int8_rows" else "fp8",
        words=_bytes(weight.tensors["values"]),
        scales=weight.tensors["scales"],
        zeros=None,
        order=None,
        n=weight.out_features,
        k=weight.in_features,
        group=0,
    )


def pack_blocks(weight: Weight) -> Packed:
    """From "fp8_blocks". Where a part ends inside a block of rows, every row has scales of its
    own."""
    scales = weight.tensors["scales"]
    whole = all(part % BLOCK == 0 for part in weight.parts[:-1])
    if not whole:
        counts = [-(-part // BLOCK) for part in weight.parts]
        rows = [
            torch.arange(part) // BLOCK + sum(counts[:index])
            for index, part in enumerate(weight.parts)
        ]
        scales = scales[torch.cat(rows).to(scales.device)]
    return Packed(
        format="fp8",
        words=_bytes(weight.tensors["values"]),
        scales=scales.contiguous(),
        zeros=None,
        order=None,
        n=weight.out_features,
        k=weight.in_features,
        group=BLOCK,
        rows_per_scale=BLOCK if whole else 1,
        ratios=_ratios(scales),
        far=_far(scales),
    )


def _ratios(scales: Tensor) -> Tensor | None:
    """`Packed.ratios` of scales [rows, groups]."""
    if scales.shape[1] == 1:
        return None
    wide = scales.double().t()
    return torch.cat([torch.ones_like(wide[:1]), wide[:-1] / wide[1:]]).float()


def _far(scales: Tensor) -> bool:
    """`Packed.far` of scales [rows, groups]."""
    sizes = scales.double().abs()
    return not (sizes.amax(1) < MOST_SPREAD * sizes.amin(1)).all()


def _bytes(values: Tensor) -> Tensor:
    """8-bit values [n, k] -> words [n, k / 4], k rounded up to 16 columns."""
    values = F.pad(values.view(torch.int8), (0, -values.shape[1] % 16))
    return interleave(values, 8).contiguous().view(torch.int32)


def panels(words: Tensor, k: int, panel: int) -> Tensor:
    """Words in the order of columns [n, ceil(k / 8)] -> [panels, n, panel / 8].

    16 bytes of a panel hold eight columns of each of its quarters. So what is multiplied with a
    plane of words, their values by one shift, is a quarter of the panel's tokens, which lie side by
    side.
    """
    values = unpack_int4(words)[:, :k]
    values = F.pad(values, (0, -k % panel)).unflatten(1, (-1, 4, panel // 32, 8))
    values = values.permute(1, 0, 3, 2, 4).flatten(2)
    return pack_nibbles(interleave(values, 4).contiguous())
