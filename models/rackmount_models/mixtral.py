"""Mixtral (arXiv 2401.04088): Mistral's attention, and experts on every layer."""

from rackmount_models.decoder import Block, CausalLM, num_experts, num_experts_per_tok
from rackmount_models.llama import SelfAttention
from rackmount_registry.config import ConfigReader
from rackmount_registry.nn import Axis, Experts, Routing, SparseMLP

PROJECTIONS = ("w1", "w3", "w2")
"""Gate, up and down."""


class MixtralForCausalLM(CausalLM):
    """Softmax routing, always renormalized."""

    def __init__(self, c: ConfigReader) -> None:
        size, experts = c.positive("hidden_size"), Axis("experts", num_experts(c))
        ffn = Axis("expert_ffn", c.positive("intermediate_size"))
        routing = Routing(top_k=num_experts_per_tok(c))
        window = None if c.get("sliding_window") is None else c.positive("sliding_window")

        def make_block(index: int) -> Block:
            attention = SelfAttention(
                c, qkv_bias=False, out_bias=False, sliding_window=window, default_theta=1e6
            )
            mlp = SparseMLP(
                Experts(
                    size,
                    experts,
                    ffn,
                    routing,
                    projections=PROJECTIONS,
                    stored_in="block_sparse_moe",
                )
            )
            return Block(c, attention, mlp)

        super().__init__(c, make_block)
