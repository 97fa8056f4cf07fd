"""Llama (arXiv 2307.09288, 2407.21783), and the dense models that differ from it in biases and
windows."""

from torch import Tensor, nn

from rackmount_models.decoder import Block, CausalLM, head_axes, sliding_windows
from rackmount_registry.config import ConfigReader
from rackmount_registry.nn import Attention, Axis, GatedMLP, Linear, MergedLinear, Rotary


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(
        self,
        c: ConfigReader,
        *,
        qkv_bias: bool,
        out_bias: bool,
        sliding_window: int | None = None,
        default_theta: float = 1e4,
    ) -> None:
        super().__init__()
        heads, kv_heads = head_axes(c)
        parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        size = c.positive("hidden_size")
        self.qkv = MergedLinear(size, parts, bias=qkv_bias)
        rope = Rotary.from_config(c, heads.width, default_theta=default_theta)
        self.attn = Attention(heads, kv_heads, rope=rope, sliding_window=sliding_window)
        self.o_proj = Linear(heads, size, bias=out_bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return self.o_proj(self.attn(q, k, v))


class LlamaForCausalLM(CausalLM):
    """Biases as `attention_bias` and `mlp_bias` say."""

    harmless = frozenset({"is_llama_config"})

    def __init__(self, c: ConfigReader) -> None:
        bias, mlp_bias = c.flag("attention_bias", False), c.flag("mlp_bias", False)
        if c.flag("rope_interleaved", False):
            raise c.error("rope_interleaved", "must be false for this architecture")
        size, ffn = c.positive("hidden_size"), Axis("ffn", c.positive("intermediate_size"))

        def make_block(index: int) -> Block:
            attention = SelfAttention(c, qkv_bias=bias, out_bias=bias)
            return Block(c, attention, GatedMLP(size, ffn, bias=mlp_bias))

        super().__init__(c, make_block)


class MistralForCausalLM(CausalLM):
    """No biases, a sliding window on every layer where there is one."""

    def __init__(self, c: ConfigReader) -> None:
        size, ffn = c.positive("hidden_size"), Axis("ffn", c.positive("intermediate_size"))
        windows = sliding_windows(c, always=True, full_layers=0)

        def make_block(index: int) -> Block:
            attention = SelfAttention(
                c, qkv_bias=False, out_bias=False, sliding_window=windows[index]
            )
            return Block(c, attention, GatedMLP(size, ffn))

        super().__init__(c, make_block)


class Qwen2ForCausalLM(CausalLM):
    """Biases on q, k and v alone; a sliding window on the layers that ask for it."""

    def __init__(self, c: ConfigReader) -> None:
        size, ffn = c.positive("hidden_size"), Axis("ffn", c.positive("intermediate_size"))
        windows = sliding_windows(c)

        def make_block(index: int) -> Block:
            attention = SelfAttention(
                c, qkv_bias=True, out_bias=False, sliding_window=windows[index]
            )
            return Block(c, attention, GatedMLP(size, ffn))

        super().__init__(c, make_block)
