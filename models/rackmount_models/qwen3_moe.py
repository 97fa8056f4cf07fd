"""Qwen3 mixture of experts (arXiv 2505.09388): softmax routing, no shared expert."""

from torch import nn

from rackmount_models.decoder import (
    Block,
    CausalLM,
    num_experts,
    num_experts_per_tok,
    sliding_windows,
)
from rackmount_models.qwen3 import SelfAttention
from rackmount_registry.config import ConfigReader
from rackmount_registry.nn import Axis, Experts, GatedMLP, Routing, SparseMLP


class Qwen3MoeForCausalLM(CausalLM):
    """Experts on every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""

    def __init__(self, c: ConfigReader) -> None:
        windows = sliding_windows(c, full_layers=0)
        experts = Axis("experts", num_experts(c))
        expert_ffn = Axis("expert_ffn", c.positive("moe_intermediate_size"))
        size, ffn = c.positive("hidden_size"), Axis("ffn", c.positive("intermediate_size"))
        routing = Routing(top_k=num_experts_per_tok(c), renormalize=c.flag("norm_topk_prob"))
        step, dense_layers = c.positive("decoder_sparse_step"), _dense_layers(c)

        def make_mlp(index: int) -> nn.Module:
            if index in dense_layers or (index + 1) % step:
                return GatedMLP(size, ffn)
            return SparseMLP(Experts(size, experts, expert_ffn, routing))

        def make_block(index: int) -> Block:
            return Block(c, SelfAttention(c, windows[index]), make_mlp(index))

        super().__init__(c, make_block)


def _dense_layers(c: ConfigReader) -> list[int]:
    layers = c.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(isinstance(index, int) for index in layers):
        raise c.error("mlp_only_layers", "must be a list of layer indexes")
    return layers
