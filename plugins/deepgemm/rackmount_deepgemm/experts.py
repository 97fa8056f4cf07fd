"""Expert kernel "deepgemm": both products over all experts in one launch each.

Few tokens lie in a box of rows for every expert, of which DeepGEMM's masked kernels compute those
that are taken. Many lie one expert after another. Boxes and experts begin at multiples of what its
contiguous kernels ask for: the masked ones write whole tiles, too, past the rows that are taken.
Boxes that a dispatcher has filled in FP8 are taken as they are, or copied where they begin
elsewhere. Where a row comes from is worked out on the device, in shapes that follow from the number
of tokens alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rackmount_deepgemm.rounding import round_groups, sum_experts
from rackmount_deepgemm.weights import values_and_scales
from rackmount_registry.experts import BatchedExpertInput, ExpertBundle, ExpertInput

MAX_BOXED_TOKENS = 256
"""Tokens that are few."""
MAX_BOXED_ROWS = 32768
"""Rows of all boxes, or they are too many. Memory is measured in the largest step, where rows lie
one expert after another: these are no more than a step of some 2,000 tokens has there."""

Values = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Values and scales of the experts' weights."""

    gate_up: Values
    down: Values

    @property
    def num_experts(self) -> int:
        return len(self.down[0])


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows of a product are."""

    source: Tensor
    """int32 [rows]: the row of the layer's input; -1 where there is none."""
    boxed: bool
    experts: Tensor
    """int32: how many rows each expert has, if boxed; otherwise whose each row is, -1 for none."""
    expected: int
    """Rows of an expert, about."""

    def taken(self) -> Tensor:
        """int32 [rows]: each row's own index; -1 where there is none of the input."""
        own = torch.arange(len(self.source), dtype=torch.int32, device=self.source.device)
        return own.where(self.source >= 0, -1)


class DeepGemmExperts:
    """See `rackmount_registry.experts.ExpertKernel`. Input of both products is rounded to FP8, with
    a scale for each token and 128 columns."""

    def prepare(self, bundle: ExpertBundle) -> Prepared:
        """Values and scales as loaded.

        Raises:
            ConfigError: see `values_and_scales`.
        """
        return Prepared(
            gate_up=values_and_scales(bundle.gate_up), down=values_and_scales(bundle.down)
        )

    def run(self, given: ExpertInput | BatchedExpertInput, prepared: Prepared) -> Tensor:
        """[T, H] in the dtype of x, or [E, C, H] in the dtype of the tokens."""
        if isinstance(given, BatchedExpertInput):
            return self._run_boxes(given, prepared)
        x, ids = given.x, given.expert_ids
        if not ids.numel():
            return torch.zeros_like(x)
        num_experts, alignment = prepared.num_experts, _alignment()
        box = -(-len(x) // alignment) * alignment
        few = len(x) <= MAX_BOXED_TOKENS and num_experts * box <= MAX_BOXED_ROWS
        rows, of_choice = (
            boxed_rows(ids, num_experts, box)
            if few
            else contiguous_rows(ids, num_experts, alignment)
        )
        y = self._products(round_groups(x, rows.source), prepared, rows, x.dtype)
        return sum_experts(y, of_choice, given.weights)

    def _run_boxes(self, given: BatchedExpertInput, prepared: Prepared) -> Tensor:
        num_experts, capacity, hidden = given.x.shape
        if not capacity:
            return given.x.new_empty(given.x.shape, dtype=given.dtype)
        box = -(-capacity // _alignment()) * _alignment()
        rows = filled_rows(given.num_valid, capacity, box)
        if given.scales is None:
            x = round_groups(given.x.reshape(-1, hidden), rows.source)
        else:
            x = _padded(given.x, box), _padded(given.scales, box)
        y = self._products(x, prepared, rows, given.dtype)
        return y.view(num_experts, box, hidden)[:, :capacity].contiguous()

    def _products(self, x: Values, prepared: Prepared, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Both, of the layer's rounded input -> [rows, H]."""
        gate_up = self._product(x, prepared.gate_up, rows, dtype)
        act = round_groups(gate_up, rows.taken(), silu_mul=True)
        return self._product(act, prepared.down, rows, dtype)

    def _product(self, x: Values, weight: Values, rows: Rows, dtype: torch.dtype) -> Tensor:
        import deep_gemm

        num_experts, out_features = weight[0].shape[:2]
        out = torch.empty(len(rows.source), out_features, dtype=dtype, device=rows.source.device)
        if not rows.boxed:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, weight, out, rows.experts)
            return out
        values, scales = (each.view(num_experts, -1, each.shape[-1]) for each in x)
        box = out.view(num_experts, -1, out_features)
        deep_gemm.fp8_m_grouped_gemm_nt_masked(
            (values, scales), weight, box, rows.experts, rows.expected
        )
        return out


def _alignment() -> int:
    import deep_gemm

    return int(deep_gemm.get_mk_alignment_for_contiguous_layout())


def _padded(boxes: Tensor, rows: int) -> Tensor:
    """Boxes [E, C, N] of so many rows instead, the further ones of any value."""
    if boxes.shape[1] == rows:
        return boxes
    wide = boxes.new_empty(len(boxes), rows, boxes.shape[2])
    wide[:, : boxes.shape[1]] = boxes
    return wide


def filled_rows(num_valid: Tensor, capacity: int, box: int) -> Rows:
    """`box` rows for every expert, the first num_valid int32 [E] of them from boxes of `capacity`
    rows."""
    place = torch.arange(box, dtype=torch.int32, device=num_valid.device)
    first = torch.arange(len(num_valid), dtype=torch.int32, device=num_valid.device) * capacity
    source = (first.unsqueeze(1) + place).where(place < num_valid.unsqueeze(1), -1).flatten()
    # How many to expect is on the device: the most there may be.
    return Rows(source=source, boxed=True, experts=num_valid, expected=capacity)


def boxed_rows(ids: Tensor, num_experts: int, box: int) -> tuple[Rows, Tensor]:
    """`box` rows, at least T, for every expert; and the row of each choice, int32 [T, K], -1 for
    none. ids int32 [T, K], -1 for none."""
    expert, place, counts = _places(ids, num_experts)
    of_choice, token = _rows(ids, expert * box + place, num_experts * box)
    expected = -(-ids.numel() // num_experts)
    return Rows(source=token, boxed=True, experts=counts, expected=expected), of_choice


def contiguous_rows(ids: Tensor, num_experts: int, alignment: int) -> tuple[Rows, Tensor]:
    """One expert after another, each from a multiple of `alignment` on; rows between them and after
    the last belong to expert -1. And the row of each choice, as above."""
    expert, place, counts = _places(ids, num_experts)
    padded = (counts + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    most = ids.numel() + min(num_experts, ids.numel()) * (alignment - 1)
    count = -(-most // alignment) * alignment
    of_choice, token = _rows(ids, (ends - padded)[expert] + place, count)
    at = torch.arange(count, dtype=ends.dtype, device=ids.device)
    owner = torch.searchsorted(ends, at, right=True).to(torch.int32)
    owner = torch.where(token >= 0, owner, -1)
    expected = -(-ids.numel() // num_experts)
    return Rows(source=token, boxed=False, experts=owner, expected=expected), of_choice


def _places(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each choice its expert int64 [T K], with 0 for none, and its place among the choices of
    that expert in order; and how many choices int32 [E] each expert has."""
    flat = ids.flatten().long()
    taken = flat >= 0
    expert = flat.where(taken, 0)
    chosen = torch.zeros(len(flat), num_experts, dtype=torch.int32, device=ids.device)
    chosen.scatter_(1, expert.unsqueeze(1), taken.int().unsqueeze(1))
    upto = chosen.cumsum(0, dtype=torch.int32)
    place = upto.gather(1, expert.unsqueeze(1)).squeeze(1).long() - 1
    return expert, place, upto[-1]


def _rows(ids: Tensor, row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The row of each choice, int32 [T, K], and the token of each row, int32 [count]."""
    taken = ids.flatten() >= 0
    tokens = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    token = torch.full((count + 1,), -1, dtype=torch.int32, device=ids.device)
    # The last place takes what takes no part, so that no shape depends on how many those are.
    token.scatter_(0, row.where(taken, count), tokens.repeat_interleave(ids.shape[1]))
    return row.where(taken, -1).to(torch.int32).view(ids.shape), token[:count]
