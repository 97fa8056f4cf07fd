"""Token dispatchers of boxes, as low-latency ones are, without communication: a plugin that knows
the registry alone."""

import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import TokenDispatcher
from rackmount_registry.experts import BatchedExpertInput, DispatchContext
from rackmount_registry.formats import BLOCK
from rackmount_registry.plugins import PluginManager

CELLS = (Cell(devices=("cpu", "cuda"), dtypes=("float32", "bfloat16", "float64")),)


@hookimpl
def token_dispatchers() -> list[TokenDispatcher]:
    return [
        TokenDispatcher(
            name="boxes",
            factory=f"{__name__}:Boxes",
            band="reference",
            layout="batched",
            cells=CELLS,
        ),
        TokenDispatcher(
            name="fp8-boxes",
            factory=f"{__name__}:Fp8Boxes",
            band="reference",
            order=None,  # it rounds the tokens
            layout="batched_fp8",
            cells=CELLS,
        ),
    ]


def batched_plugin() -> PluginManager:
    """The plugin of this module, as the distribution "acme-boxes"."""
    return PluginManager.from_modules({"acme-boxes": sys.modules[__name__]})


class Boxes:
    """See `rackmount_registry.experts.TokenDispatcher`. Every rank holds all tokens, as with
    "local"; rows that no token takes are not a number."""

    def __init__(self, context: DispatchContext) -> None:
        self._experts = context.local_experts
        self.reduces = context.group.size == 1

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> BatchedExpertInput:
        """A box has a row for each token, since a token's experts are all different."""
        num_experts, (count, hidden) = self._experts.size, x.shape
        local = expert_ids.long() - self._experts.start
        mine = (expert_ids >= 0) & (local >= 0) & (local < num_experts)
        tokens, choices = torch.where(mine)
        expert = local[tokens, choices]
        chosen = F.one_hot(expert, num_experts)
        place = (chosen.cumsum(0) - 1).gather(1, expert.unsqueeze(1)).squeeze(1)
        boxes = torch.full((num_experts, count, hidden), torch.nan, dtype=x.dtype, device=x.device)
        boxes[expert, place] = x[tokens]
        return BatchedExpertInput(
            x=boxes,
            num_valid=chosen.sum(0, dtype=torch.int32),
            dtype=x.dtype,
            handle=(count, tokens, expert, place, weights[tokens, choices]),
        )

    def combine(self, out: Tensor, given: BatchedExpertInput) -> Tensor:
        """Rows gathered, weighted and added in float32 at least."""
        count, tokens, expert, place, weights = given.handle
        assert out.shape == given.x.shape and out.dtype == given.dtype and out.is_contiguous()
        wide = torch.promote_types(out.dtype, torch.float32)
        rows = out[expert, place].to(wide) * weights.to(wide).unsqueeze(-1)
        total = torch.zeros(count, out.shape[2], dtype=wide, device=out.device)
        return total.index_add_(0, tokens, rows).to(out.dtype)


class Fp8Boxes(Boxes):
    """The same with x in FP8 and a scale for each row and 128 columns."""

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> BatchedExpertInput:
        given = super().dispatch(x, expert_ids, weights)
        values, scales = round_columns(given.x)
        return replace(given, x=values, scales=scales)


def round_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn values [..., H] and float32 scales [..., H / 128, rounded up] of x [..., H];
    scales lie column by column, as DeepEP's do."""
    columns = x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / 448)
    values = (groups / scales.unsqueeze(-1)).flatten(-2)[..., :columns]
    return values.to(torch.float8_e4m3fn), scales.mT.contiguous().mT
