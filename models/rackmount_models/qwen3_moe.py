"""Qwen3 mixture of experts (arXiv 2505.09388): softmax routing, no shared expert."""

from torch import nn

from rackmount_models.decoder import Block, CausalLM, sliding_windows
from rackmount_models.qwen3 import SelfAttention
from rackmount_registry.config import ConfigReader
from rackmount_registry.nn import Axis, Experts, GatedMLP, Routing


class Qwen3MoeForCausalLM(CausalLM):
    """Experts on every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""

    def __init__(self, c: ConfigReader) -> None:
        windows = sliding_windows(c, full_layers=0)
        experts = Axis("experts", _num_experts(c))
        expert_ffn = Axis("expert_ffn", c.moe_intermediate_size)
        ffn = Axis("ffn", c.intermediate_size)
        routing = Routing(top_k=c.num_experts_per_tok, renormalize=c.norm_topk_prob)
        step, dense_layers = c.decoder_sparse_step, set(c.get("mlp_only_layers") or ())

        def make_mlp(index: int) -> nn.Module:
            if index in dense_layers or (index + 1) % step:
                return GatedMLP(c.hidden_size, ffn)
            return Experts(c.hidden_size, experts, expert_ffn, routing)

        def make_block(index: int) -> Block:
            return Block(c, SelfAttention(c, windows[index]), make_mlp(index))

        super().__init__(c, make_block)


def _num_experts(c: ConfigReader) -> int:
    """`num_experts`, which transformers 5 saves as `num_local_experts`."""
    given, saved = c.get("num_experts"), c.get("num_local_experts")
    if None not in (given, saved) and given != saved:
        raise c.error("num_experts", f"disagrees with num_local_experts={saved}")
    return c.num_experts if saved is None else saved
