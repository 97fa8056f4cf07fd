"""Expert kernel "torch": the definition of a mixture of experts, one expert after another."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry.experts import BatchedExpertInput, ExpertBundle, ExpertInput
from rackmount_registry.formats import BLOCK, Weight
from rackmount_registry.ops import silu_mul


class TorchExperts:
    """See `rackmount_registry.experts.ExpertKernel`. Takes every named weight format and layout."""

    def prepare(self, bundle: ExpertBundle) -> ExpertBundle:
        """The bundle as loaded."""
        return bundle

    def run(self, given: ExpertInput | BatchedExpertInput, prepared: ExpertBundle) -> Tensor:
        """[T, H] in the dtype of x, or [E, C, H] in the dtype of the tokens.

        A token's experts are added in float32 at least, by rising expert, so that its sum does not
        depend on the other tokens. Rows of boxes that no token takes are not a number.
        """
        if isinstance(given, BatchedExpertInput):
            return _run_boxes(given, prepared)
        x, expert_ids = given.x, given.expert_ids
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert in torch.unique(expert_ids).tolist():
            if expert < 0:
                continue
            tokens, choices = torch.where(expert_ids == expert)
            y = _expert(x[tokens], prepared, expert)
            weights = given.weights[tokens, choices].to(out.dtype)
            out.index_add_(0, tokens, y.to(out.dtype) * weights.unsqueeze(-1))
        return out.to(x.dtype)


def _run_boxes(given: BatchedExpertInput, bundle: ExpertBundle) -> Tensor:
    out = torch.full(given.x.shape, torch.nan, dtype=given.dtype, device=given.x.device)
    for expert, count in enumerate(given.num_valid.tolist()):
        if not count:
            continue
        x = given.x[expert, :count]
        if given.scales is not None:
            factors = given.scales[expert, :count].repeat_interleave(BLOCK, -1)
            x = x.float() * factors[:, : x.shape[1]]
        out[expert, :count] = _expert(x, bundle, expert).to(given.dtype)
    return out


def _expert(x: Tensor, bundle: ExpertBundle, expert: int) -> Tensor:
    """x [n, H] through one expert -> [n, H]."""
    gate, up = _product(x, bundle.gate_up.expert(expert)).chunk(2, -1)
    return _product(silu_mul(gate, up), bundle.down.expert(expert))


def _product(x: Tensor, weight: Weight) -> Tensor:
    """x [n, in] times the weight -> [n, out], in the wider of their dtypes."""
    dense = weight.dequantize()
    wide = torch.promote_types(x.dtype, dense.dtype)
    return F.linear(x.to(wide), dense.to(wide))
