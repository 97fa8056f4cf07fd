"""What a model's configuration and the engine's arguments lead to, or why they are refused."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.mounting import plugins
from torch import Tensor, nn

from rackmount.config import EngineConfig
from rackmount.decisions import decisions
from rackmount.rack import Rack, draft_rack
from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell, Demand
from rackmount_registry.config import ConfigReader
from rackmount_registry.descriptors import Architecture, AttentionBackend, QuantizationScheme
from rackmount_registry.errors import ConfigError, PluginError
from rackmount_registry.formats import DENSE, StoredFormat
from rackmount_registry.nn import Attention, Axis, Embedding, Layers, Linear, MergedLinear
from rackmount_registry.plugins import PluginManager

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
}
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}


def rack_of(model: dict[str, Any], manager: PluginManager | None = None, **given: Any) -> Rack:
    """The rack of a config.json's content, on the CPU."""
    config = EngineConfig.create(model="m", device="cpu", **given)
    return draft_rack(config, model, manager or plugins())


@pytest.mark.parametrize("value", ["64", 64.0, 0, -64, True, [64]])
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
        "head_dim",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "decoder_sparse_step",
        "sliding_window",
    ],
)
def test_a_size_that_is_no_positive_integer_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        rack_of(MOE | {key: value})
    assert str(caught.value) == f"config.json of m: {key}={value!r} must be a positive integer"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization_config": "awq"}, "quantization_config='awq' must be an object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config lacks the key 'quant_method'"),
        ({"quantization_config": {"quant_method": 7}}, "quant_method=7 must be the name of"),
        ({"dtype": 7}, "dtype=7 must be one of float32, bfloat16, float16, float64"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn' must be one of float32"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a positive number"),
        ({"attention_bias": "false"}, "attention_bias='false' must be true or false"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        ({"use_sliding_window": "no"}, "use_sliding_window='no' must be true or false"),
        ({"head_dim": 15}, "head_dim=15 must be even where features turn in pairs"),
        ({"max_window_layers": -1}, "max_window_layers=-1 must be a number of layers"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' must name"),
        ({"layer_types": [["full_attention"]] * 2}, "must name full_attention or sliding"),
        ({"mlp_only_layers": "01"}, "mlp_only_layers='01' must be a list of layer indexes"),
        ({"num_local_experts": 4}, "num_experts=8 disagrees with num_local_experts=4"),
    ],
)
def test_a_value_of_another_kind_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        rack_of(MOE | values)
    assert str(caught.value).startswith("config.json of m: ")


def test_settings_of_a_file_beside_are_refused_with_its_name() -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    for more, message in (
        ({"checksum": 1}, "rackmount does not read checksum"),
        ({"bits": 3}, "bits=3 must be 4 or 8"),
        ({"dtype": 1}, "rackmount does not read dtype"),
    ):
        for place, name in (
            ({}, "config.json of m: quantization_config"),
            ({"quantization_file": "quantize_config.json"}, "quantize_config.json of m"),
        ):
            with pytest.raises(ConfigError, match=message) as caught:
                rack_of(LLAMA | place | {"quantization_config": stored | more})
            assert str(caught.value).startswith(f"{name}: ")


def test_the_dtype_is_the_checkpoints_in_either_spelling_unless_one_is_asked_for() -> None:
    for model, dtype in (
        (LLAMA, torch.float32),
        (LLAMA | {"torch_dtype": "float16"}, torch.float16),
        (LLAMA | {"torch_dtype": "float16", "dtype": "bfloat16"}, torch.bfloat16),
        (LLAMA | {"torch_dtype": "float16", "dtype": None}, torch.float16),
    ):
        assert rack_of(model).dtype is dtype
    assert rack_of(LLAMA | {"dtype": "float16"}, dtype="float64").dtype is torch.float64


def test_a_quantization_method_that_nobody_claims_is_refused_with_those_mounted() -> None:
    with pytest.raises(PluginError, match=r"unknown quantization_scheme 'exl3'.*mounted: .*w8"):
        rack_of(LLAMA | {"quantization_config": {"quant_method": "exl3"}})


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),  # its length is the stretched one already
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "original_max_position_embeddings": 24}, 64),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32}, 64),
    ],
)
def test_the_longest_sequence_is_the_models_or_what_its_rope_stretches_to(
    scaling: dict[str, Any] | None, longest: int
) -> None:
    spellings = [
        {"rope_scaling": scaling},
        {"rope_parameters": scaling and scaling | {"rope_theta": 1e4}},
    ]
    for spelling in spellings:
        model = LLAMA | spelling
        assert rack_of(model).max_model_len == 64
        assert rack_of(model, max_model_len=longest).max_model_len == longest
        with pytest.raises(ConfigError, match=f"={longest + 1} .* choose at most {longest}$"):
            rack_of(model, max_model_len=longest + 1)


def test_a_sequence_has_room_for_a_token_and_its_answer() -> None:
    assert rack_of(LLAMA, max_model_len=2).max_model_len == 2
    with pytest.raises(ConfigError, match="max_model_len=1 must be at least 2"):
        rack_of(LLAMA, max_model_len=1)


class Unrotated(nn.Module):
    """Attention without positions, of the head sizes that its configuration lists."""

    def __init__(self, c: ConfigReader) -> None:
        super().__init__()
        self.embed = Embedding(Axis("vocab", 8), 16)
        sizes = c.head_sizes
        self.layers = Layers[Layer](len(sizes), lambda index: Layer(sizes[index]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        heads, kv_heads = Axis("heads", 2, size), Axis("kv_heads", 2, size, replicate=True)
        self.qkv = MergedLinear(16, {"q": heads, "k": kv_heads, "v": kv_heads})
        self.attn = Attention(heads, kv_heads, rope=None)
        self.out = Linear(heads, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attn(*self.qkv(x)))


def with_unrotated() -> PluginManager:
    """All that is installed, and the architecture above."""
    part = Architecture(name="unrotated", factory=f"{__name__}:Unrotated", claims=("Unrotated",))
    own = SimpleNamespace(architectures=hookimpl(lambda: [part]))
    return plugins() + PluginManager.from_modules({"own": own})


def test_layers_of_different_head_sizes_are_refused_with_the_sizes() -> None:
    model = {"architectures": ["Unrotated"], "max_position_embeddings": 64, "head_sizes": [16, 8]}
    with pytest.raises(ConfigError, match=r"head sizes \[8, 16\] need several KV groups"):
        rack_of(model, with_unrotated())


def test_a_model_without_rotary_positions_knows_what_it_claims() -> None:
    model = {"architectures": ["Unrotated"], "max_position_embeddings": 64, "head_sizes": [8, 8]}
    assert rack_of(model, with_unrotated(), max_model_len=64).max_model_len == 64
    with pytest.raises(ConfigError, match="choose at most 64"):
        rack_of(model, with_unrotated(), max_model_len=65)


def test_a_cache_layout_that_is_not_specified_is_refused() -> None:
    plugin = ModuleType("acme")
    part = AttentionBackend(
        name="acme",
        factory="acme:Backend",
        band="reference",
        cells=(Cell(),),
        cache_layout="acme-pages",
        preferred_block_sizes=(16,),
    )
    plugin.attention_backends = hookimpl(lambda: [part])  # type: ignore[attr-defined]
    manager = plugins() + PluginManager.from_modules({"acme": plugin})
    with pytest.raises(PluginError, match="names the cache layout 'acme-pages'; legal are slots"):
        rack_of(LLAMA, manager, backend="acme")


def no_group_of_two(demand: Demand) -> str:
    """A backend's `jit`: kernels are there of each number of query heads to a KV head but two."""
    groups = {layer.num_heads // layer.num_kv_heads for layer in demand.layers}
    assert groups, "the layers are told"
    return "a group of two is not compiled" if 2 in groups else ""


def test_auto_asks_for_compiled_kernels_of_the_models_own_layers() -> None:
    plugin = ModuleType("compiling")
    part = AttentionBackend(
        name="compiling",
        factory="compiling:Backend",
        band="vendor",
        cells=(Cell(),),
        cache_layout="slots",
        preferred_block_sizes=(16,),
        jit=f"{__name__}:no_group_of_two",
    )
    plugin.attention_backends = hookimpl(lambda: [part])  # type: ignore[attr-defined]
    manager = plugins() + PluginManager.from_modules({"compiling": plugin})
    for kv_heads, name in ((1, "compiling"), (2, "torch"), (4, "compiling")):
        model = LLAMA | {"num_key_value_heads": kv_heads}
        rack = rack_of(model, manager, auto_plugins=("compiling",))
        assert (rack.attention.prefill.name, rack.attention.decode.name) == (name, name)


class Rounds:
    """A scheme of plain checkpoints."""

    kv_cache = None

    def __init__(self, config: ConfigReader | None) -> None:
        assert config is None

    def format_for(self, name: str, shape: tuple[int, int], role: str) -> StoredFormat | None:
        return replace(DENSE, name="rounded") if role == "linear" else None


def test_a_scheme_that_can_rounds_a_plain_checkpoint_when_asked() -> None:
    part = QuantizationScheme(name="mine", factory=f"{__name__}:Rounds", claims=(), online=True)
    own = SimpleNamespace(quantization_schemes=hookimpl(lambda: [part]))
    manager = plugins() + PluginManager.from_modules({"own": own})
    rack = rack_of(LLAMA, manager, quantization="mine")
    names = {w.stored.name for s in rack.draft.sockets for w in s.weights() if w.role == "linear"}
    assert names == {"rounded"}
    assert rack.scheme is not None and rack.scheme.name == "mine"
    (told,) = (each for each in decisions(rack, manager) if each.kind == "quantization_scheme")
    assert told.why == "requested"
    with pytest.raises(ConfigError, match=r"quantization='w8' is none of .* plain .*, mine"):
        rack_of(LLAMA, manager, quantization="w8")
