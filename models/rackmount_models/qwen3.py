"""Qwen3 dense (arXiv 2505.09388): norms on single query and key heads, head size apart from hidden
/ heads."""

from torch import Tensor, nn

from rackmount_models.decoder import Block, CausalLM, head_axes, sliding_windows
from rackmount_registry.config import ConfigReader
from rackmount_registry.nn import Attention, Axis, GatedMLP, Linear, MergedLinear, Rotary


class SelfAttention(nn.Module):
    """Grouped-query attention with head norms before the rotary embedding."""

    def __init__(self, c: ConfigReader, sliding_window: int | None) -> None:
        super().__init__()
        heads, kv_heads = head_axes(c)
        size, bias = c.positive("hidden_size"), c.flag("attention_bias", False)
        parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self.qkv = MergedLinear(size, parts, bias=bias)
        self.attn = Attention(
            heads,
            kv_heads,
            rope=Rotary.from_config(c, heads.width),
            q_norm="q_norm",
            k_norm="k_norm",
            norm_eps=c.number("rms_norm_eps"),
            sliding_window=sliding_window,
        )
        self.o_proj = Linear(heads, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return self.o_proj(self.attn(q, k, v))


class Qwen3ForCausalLM(CausalLM):
    """Dense feed-forward blocks."""

    def __init__(self, c: ConfigReader) -> None:
        size, ffn = c.positive("hidden_size"), Axis("ffn", c.positive("intermediate_size"))
        windows = sliding_windows(c)

        def make_block(index: int) -> Block:
            return Block(c, SelfAttention(c, windows[index]), GatedMLP(size, ffn))

        super().__init__(c, make_block)
