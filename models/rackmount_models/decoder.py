"""The frame that dense and sparse decoders share: pre-norm blocks between an embedding and an
output head."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from rackmount_registry.config import ConfigReader, head_dim, tied
from rackmount_registry.nn import Axis, Embedding, Layers, Norm, OutputHead


class Block(nn.Module):
    """One layer: x + self_attn(norm(x)), then + mlp(norm(·))."""

    def __init__(self, c: ConfigReader, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        size, eps = c.positive("hidden_size"), c.number("rms_norm_eps")
        self.input_layernorm = Norm(size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks, final norm: ids [T] -> hidden states [T, hidden]."""

    def __init__(self, c: ConfigReader, vocab: Axis, make_block: Callable[[int], Block]) -> None:
        super().__init__()
        size = c.positive("hidden_size")
        self.embed_tokens = Embedding(vocab, size)
        self.layers = Layers[Block](c.positive("num_hidden_layers"), make_block)
        self.norm = Norm(size, c.number("rms_norm_eps"))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CausalLM(nn.Module):
    """A decoder with its output head, tied to the embedding where the configuration says so."""

    ignored: ClassVar[dict[str, str]] = {
        r".*\.rotary_emb\.inv_freq": "computed from the configuration"
    }

    def __init__(self, c: ConfigReader, make_block: Callable[[int], Block]) -> None:
        super().__init__()
        if c.get("hidden_act", "silu") != "silu":
            raise c.error("hidden_act", "must be 'silu' for this architecture")
        vocab = Axis("vocab", c.positive("vocab_size"))
        self.model = Decoder(c, vocab, make_block)
        embedding = self.model.embed_tokens if tied(c) else None
        self.lm_head = OutputHead(c.positive("hidden_size"), vocab, tied=embedding)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def logits(self, rows: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, vocabulary]."""
        return self.lm_head(rows)


def head_axes(c: ConfigReader) -> tuple[Axis, Axis]:
    """Query heads and key/value heads; `head_dim` may differ from hidden / heads."""
    heads, width = c.positive("num_attention_heads"), head_dim(c)
    kv_heads = c.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise c.error("num_key_value_heads", f"must divide num_attention_heads={heads}")
    return Axis("heads", heads, width), Axis("kv_heads", kv_heads, width, replicate=True)


def num_experts(c: ConfigReader) -> int:
    """Routed experts of a layer: `num_experts`, which transformers 5 saves as `num_local_experts`,
    or the other way round."""
    keys = [key for key in ("num_experts", "num_local_experts") if c.get(key) is not None]
    counts = {c.positive(key) for key in keys or ("num_experts",)}
    if len(counts) > 1:
        raise c.error("num_experts", f"disagrees with num_local_experts={c.num_local_experts}")
    return counts.pop()


def num_experts_per_tok(c: ConfigReader) -> int:
    """Experts that a token chooses: no more than there are."""
    chosen, count = c.positive("num_experts_per_tok"), num_experts(c)
    if chosen > count:
        raise c.error("num_experts_per_tok", f"must be at most the number of experts, {count}")
    return chosen


def sliding_windows(
    c: ConfigReader, *, always: bool = False, full_layers: int = 28
) -> list[int | None]:
    """The window of each layer; None sees everything.

    Args:
        always: the family has windows unless `sliding_window` is null; else `use_sliding_window`
            must ask for them.
        full_layers: first layers that see everything where `max_window_layers` does not say; the
            defaults, like that of the window itself, are those of `transformers`.
    """
    absent = c.get("sliding_window", 4096) is None
    window = None if absent else c.positive("sliding_window", 4096)
    used, count = c.flag("use_sliding_window", always), c.positive("num_hidden_layers")
    full, kinds = c.get("max_window_layers", full_layers), c.get("layer_types")
    if not isinstance(full, int) or full < 0:
        raise c.error("max_window_layers", "must be a number of layers")
    if kinds is None:
        return [window if used and index >= full else None for index in range(count)]
    legal = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in legal for k in kinds):
        raise c.error(
            "layer_types", "must name full_attention or sliding_attention once for each layer"
        )
    return [window if used and kind == "sliding_attention" else None for kind in kinds]
