import copy
import math

import pytest

from rackmount_registry.config import (
    HARMLESS,
    ConfigReader,
    RopeConfig,
    head_dim,
    rope,
    tied,
)
from rackmount_registry.errors import ConfigError

LLAMA_NUMBERS = {
    *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "mlp_bias"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("rope_parameters", "tie_word_embeddings", "vocab_size"),
}
WINDOW = {"sliding_window", "use_sliding_window"}
ROUTING = {"moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok"}
LATENT = {
    *("first_k_dense_replace", "kv_lora_rank", "n_group", "n_routed_experts", "n_shared_experts"),
    *("q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "topk_group"),
    *("routed_scaling_factor", "v_head_dim"),
}
NUMBERS = {
    "LlamaConfig": LLAMA_NUMBERS,
    "Qwen3Config": LLAMA_NUMBERS - {"mlp_bias"} | WINDOW | {"layer_types", "max_window_layers"},
    "Qwen3MoeConfig": LLAMA_NUMBERS - {"mlp_bias", "head_dim"}
    | WINDOW
    | ROUTING
    | {"decoder_sparse_step", "mlp_only_layers", "num_local_experts"},
    "MixtralConfig": LLAMA_NUMBERS - {"mlp_bias", "attention_bias"}
    | {"num_experts_per_tok", "num_local_experts", "sliding_window"},
    "DeepseekV2Config": LLAMA_NUMBERS | ROUTING | LATENT | {"topk_method"},
    "DeepseekV3Config": LLAMA_NUMBERS - {"mlp_bias"}
    | ROUTING
    | LATENT
    | {"num_nextn_predict_layers", "rope_interleave"},
}
"""Every key that changes the numbers of a model, by the class that saves it."""


def reader(**values: object) -> ConfigReader:
    return ConfigReader({"max_position_embeddings": 8192, **values}, "model/config.json")


@pytest.mark.parametrize("name", NUMBERS)
def test_what_transformers_saves_is_harmless_or_changes_numbers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    saved = getattr(transformers, name)().to_dict()
    assert set(ConfigReader(saved).unread()) == NUMBERS[name]


def test_no_key_that_changes_numbers_is_harmless() -> None:
    assert not HARMLESS & set().union(*NUMBERS.values())
    assert not HARMLESS & {"rope_theta", "rope_scaling", "num_experts", "scoring_func"}


def test_a_missing_key_is_named_with_its_file_and_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"model/config.json lacks the key 'hidden_size'.*'hiden"):
        _ = reader(hiden_size=4).hidden_size


def test_a_required_key_may_not_be_null_but_get_tells_null_from_missing() -> None:
    c = reader(sliding_window=None)
    with pytest.raises(ConfigError, match="has null for the key 'sliding_window'"):
        _ = c.sliding_window
    assert c.get("sliding_window", 4096) is None
    assert c.get("other", 4096) == 4096


def test_typed_reads_take_their_default_for_null_and_missing_alone() -> None:
    c = reader(size=4, empty=None, zero=0, off=False, eps=1, spelled="4", nan=math.nan)
    assert (c.positive("size"), c.positive("size", 7), c.number("eps")) == (4, 4, 1)
    assert (c.positive("empty", 7), c.number("absent", 0.5)) == (7, 0.5)
    assert (c.flag("off", True), c.flag("empty", True), c.flag("absent", False)) == (0, 1, 0)
    with pytest.raises(ConfigError, match="zero=0 must be a positive integer"):
        c.positive("zero", 7)
    with pytest.raises(ConfigError, match="spelled='4' must be a positive number"):
        c.number("spelled")
    with pytest.raises(ConfigError, match="nan=nan must be a positive number"):
        c.number("nan")
    with pytest.raises(ConfigError, match="zero=0 must be true or false"):
        c.flag("zero")
    with pytest.raises(ConfigError, match="has null for the key 'empty'"):
        c.positive("empty")
    with pytest.raises(ConfigError, match="lacks the key 'absent'"):
        c.flag("absent")
    assert c.unread() == []


def test_keys_that_were_not_read_are_refused_by_name() -> None:
    c = reader(hidden_size=4, rms_norm_eps=1e-5, sliding_window=64, torch_dtype="bfloat16")
    assert c.hidden_size == 4
    with pytest.raises(
        ConfigError, match=r"does not read rms_norm_eps, sliding_window, and .* might"
    ):
        c.require_all_read()
    _ = c.rms_norm_eps, c.get("sliding_window")
    c.require_all_read()


def test_an_architecture_may_name_more_harmless_keys() -> None:
    c = reader(extra=1, quant={"a": 1, "b": 2})
    sub = c.sub("quant")
    assert sub is not None and sub.a == 1
    assert c.unread() == ["extra", "quant.b"]
    assert c.unread(frozenset({"extra", "quant.b"})) == []


def test_nested_readers_keep_one_record_and_know_no_harmless_keys() -> None:
    c = reader(quantization={"dtype": "int8", "bits": 8})
    first, second = c.sub("quantization"), c.sub("quantization")
    assert first is second is not None
    assert c.unread() == ["quantization.bits", "quantization.dtype"]
    assert (first.bits, first.dtype) == (8, "int8")
    assert c.unread() == []
    with pytest.raises(ConfigError, match=r"config.json: quantization lacks the key 'group_size'"):
        _ = first.group_size


def test_a_nested_reader_is_none_where_there_is_nothing_and_an_error_where_no_object_is() -> None:
    c = reader(rope_scaling=None, quantization=4)
    assert c.sub("rope_scaling") is None and c.sub("absent") is None
    assert c.unread() == ["quantization"]
    with pytest.raises(ConfigError, match="quantization=4 must be an object"):
        c.sub("quantization")


def test_an_error_shows_the_beginning_of_a_long_value() -> None:
    long = ConfigReader({"names": ["layer"] * 1000}, "config.json").error("names", "must be short")
    assert 300 < len(str(long)) < 400
    assert str(long).startswith("config.json: names=['layer', ")
    assert str(long).endswith("... must be short")


def test_a_reader_can_be_copied_with_its_record() -> None:
    c = reader(a=1, b=2)
    _ = c.a
    assert copy.deepcopy(c).unread() == ["b"]


def test_head_size_is_given_or_divides_the_hidden_size() -> None:
    assert head_dim(reader(hidden_size=64, num_attention_heads=4)) == 16
    assert head_dim(reader(hidden_size=64, num_attention_heads=4, head_dim=None)) == 16
    assert head_dim(reader(hidden_size=60, num_attention_heads=8, head_dim=32)) == 32
    with pytest.raises(ConfigError, match=r"hidden_size=60 must be a multiple of num_att.*=8"):
        head_dim(reader(hidden_size=60, num_attention_heads=8))
    with pytest.raises(ConfigError, match="head_dim=0 must be a positive integer"):
        head_dim(reader(hidden_size=64, num_attention_heads=4, head_dim=0))


def test_tying_follows_the_file_and_else_the_architecture() -> None:
    assert tied(reader(tie_word_embeddings=True))
    assert not tied(reader(tie_word_embeddings=False), default=True)
    assert not tied(reader()) and tied(reader(), default=True)
    with pytest.raises(ConfigError, match="tie_word_embeddings='yes' must be true or false"):
        tied(reader(tie_word_embeddings="yes"))


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 0.7},
}


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_spelling_give_the_same_rope(kind: str, type_key: str) -> None:
    scaling = {type_key: kind, **ROPES[kind]}
    old = reader(rope_theta=5e5, rope_scaling=scaling, partial_rotary_factor=0.5)
    shared = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    new = reader(rope_parameters={"rope_type": kind, **shared, **ROPES[kind]})
    assert rope(old) == rope(new)
    assert rope(new).theta == 5e5 and rope(new).partial_rotary_factor == 0.5
    assert old.unread() == new.unread() == []


@pytest.mark.parametrize("kind", ROPES)
def test_both_spellings_together_are_fine_where_they_agree(kind: str) -> None:
    both = reader(
        rope_theta=5e5,
        rope_scaling={"type": kind, **ROPES[kind]},
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **ROPES[kind]},
    )
    assert rope(both).rope_type == kind


@pytest.mark.parametrize("kind", ROPES)
def test_rope_values_are_those_that_transformers_reads(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    saved = transformers.LlamaConfig(
        rope_theta=5e5,
        max_position_embeddings=8192,
        rope_scaling={"rope_type": kind, **ROPES[kind]} if ROPES[kind] else None,
    ).to_dict()
    expected = dict(saved["rope_parameters"])
    found = rope(ConfigReader(saved))
    assert found.theta == expected.pop("rope_theta")
    assert found.original_max_position == expected.pop("original_max_position_embeddings", None)
    assert {key: getattr(found, key) for key in expected} == expected


def test_without_any_rope_key_the_default_theta_is_the_architectures() -> None:
    assert rope(reader()) == RopeConfig(rope_type="default", theta=10000.0)
    assert rope(reader(rope_scaling=None), default_theta=1e6).theta == 1e6


def test_yarn_without_factor_takes_the_ratio_of_lengths() -> None:
    scaling = {"type": "yarn", "factor": None, "original_max_position_embeddings": 2048}
    found = rope(reader(rope_scaling=scaling))
    assert (found.factor, found.attention_factor, found.truncate) == (4.0, None, True)
    assert (found.beta_fast, found.beta_slow) == (32.0, 1.0)


def test_the_original_length_defaults_to_the_models() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0}
    assert rope(reader(rope_scaling=scaling)).original_max_position == 8192


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "unknown rope_type 'longrope'; choose one of default, linear, dynamic, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "unknown rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor, which linear needs"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5, which must be at least"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor=nan"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor=True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9}}, "not know: alpha"),
        ({"rope_parameters": {"full_attention": {}}}, "not know: full_attention"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "names two different types"),
        ({"rope_scaling": 4}, "rope_scaling=4 must be an object"),
        ({"rope_theta": 0}, "rope_theta=0, which must be positive"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5, which must be above 0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "disagrees with 1000000.0"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling=.* disagrees with rope_parameters",
        ),
        (
            {"rope_scaling": {"type": "llama3", **ROPES["llama3"], "high_freq_factor": 1.0}},
            "high_freq_factor > low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}},
            "beta_fast >= beta_slow",
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
            "original_max_position_embeddings=0, which must be a positive integer",
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16384}},
            "factor=0.5, which must be at least 1",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}},
            "truncate=1, which must be true or false",
        ),
    ],
)
def test_a_rope_that_breaks_a_rule_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope(reader(**values))
