"""Expert kernel "torch": the definition of a mixture of experts, one expert after another."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight
from rackmount_registry.ops import silu_mul


class TorchExperts:
    """See `rackmount_registry.experts.ExpertKernel`. Takes every named weight format."""

    def prepare(self, bundle: ExpertBundle) -> ExpertBundle:
        """The bundle as loaded."""
        return bundle

    def run(self, given: ExpertInput, prepared: ExpertBundle) -> Tensor:
        """[T, H] in the dtype of x.

        A token's experts are added in float32 at least, by rising expert, so that its sum does not
        depend on the other tokens.
        """
        x, expert_ids = given.x, given.expert_ids
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert in torch.unique(expert_ids).tolist():
            if expert < 0:
                continue
            tokens, choices = torch.where(expert_ids == expert)
            gate, up = _product(x[tokens], prepared.gate_up.expert(expert)).chunk(2, -1)
            y = _product(silu_mul(gate, up), prepared.down.expert(expert))
            weights = given.weights[tokens, choices].to(out.dtype)
            out.index_add_(0, tokens, y.to(out.dtype) * weights.unsqueeze(-1))
        return out.to(x.dtype)


def _product(x: Tensor, weight: Weight) -> Tensor:
    """x [n, in] times the weight -> [n, out], in the wider of their dtypes."""
    dense = weight.dequantize()
    wide = torch.promote_types(x.dtype, dense.dtype)
    return F.linear(x.to(wide), dense.to(wide))
