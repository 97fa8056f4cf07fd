"""A draft knows everything about a rank before any memory is taken."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from tests.helpers.mounting import chosen_parts
from torch import Tensor, nn

from rackmount_models.llama import LlamaForCausalLM, Qwen2ForCausalLM
from rackmount_models.qwen3 import Qwen3ForCausalLM
from rackmount_registry.axes import Mesh, Solo
from rackmount_registry.config import ConfigReader
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import DENSE, Role, StoredFormat
from rackmount_registry.mount import Draft, assemble, draft
from rackmount_registry.step import ReferenceStep

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
KNOWN = {
    "Qwen3-0.6B": (Qwen3ForCausalLM, QWEN3_0_6B, 112, 596_049_920),
    "Llama-3-8B": (LlamaForCausalLM, LLAMA_3_8B, 128, 8_030_261_248),
    "Llama-3-70B": (LlamaForCausalLM, LLAMA_3_70B, 320, 70_553_706_496),
}
"""Model -> class, configuration, KiB of keys and values per token in bfloat16, parameters."""


def drafted(
    build: Any = LlamaForCausalLM, mesh: Mesh | None = None, scheme: Any = None, **config: Any
) -> Draft:
    reader = ConfigReader(LLAMA_3_8B | config)
    return draft(build, reader, dtype=torch.bfloat16, mesh=mesh, scheme=scheme)


def kib_per_token(found: Draft) -> float:
    return sum(spec.bytes_per_token for spec in found.cache_specs(torch.bfloat16)) / 1024


@pytest.mark.parametrize("model", KNOWN)
def test_sizes_of_known_models(model: str) -> None:
    build, config, kib, num_parameters = KNOWN[model]
    found = draft(build, ConfigReader(config), dtype=torch.bfloat16)
    assert kib_per_token(found) == kib
    assert found.weight_bytes == 2 * num_parameters
    assert found.vocab_size == config["vocab_size"]


def test_a_rank_holds_its_share_and_replicated_kv_heads_whole() -> None:
    eighth = drafted(mesh=Mesh.tensor_parallel(Solo(3, 8)))
    assert kib_per_token(eighth) == 16
    assert kib_per_token(drafted(mesh=Mesh.tensor_parallel(Solo(3, 16)))) == 16
    norms = 2 * 4096 * (2 * 32 + 1)
    assert eighth.weight_bytes - norms == (2 * 8_030_261_248 - norms) / 8


def test_no_memory_is_taken() -> None:
    found = drafted()
    assert all(storage.tensor.device.type == "meta" for storage in found.storages())
    assert not list(found.model.parameters())


def test_attention_layers_are_numbered_in_order() -> None:
    found = drafted(num_hidden_layers=3)
    assert [layer.index for layer in found.attention] == [0, 1, 2]
    assert [layer.path for layer in found.attention] == [
        f"model.layers.{i}.self_attn.attn" for i in range(3)
    ]


def test_layers_with_and_without_a_window_are_distinct_demands() -> None:
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 30}
    found = drafted(Qwen2ForCausalLM, **window)
    assert {params.sliding_window for params in found.attention_params} == {None, 64}
    assert {params.features for params in found.attention_params} == {
        frozenset(),
        frozenset({"sliding_window"}),
    }
    assert len(drafted().attention_params) == 1


def test_keys_that_the_model_never_reads_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"does not read sliding_window, soft_cap, and"):
        drafted(sliding_window=64, soft_cap=30.0)


def test_an_architecture_may_name_keys_harmless() -> None:
    class Lenient(LlamaForCausalLM):
        harmless = frozenset({"soft_cap"})

    assert drafted(Lenient, soft_cap=30.0).vocab_size == 128256
    with pytest.raises(ConfigError, match="does not read hard_cap, and"):
        drafted(Lenient, soft_cap=30.0, hard_cap=30.0)


def test_a_key_that_the_model_needs_is_missed() -> None:
    reader = ConfigReader({k: v for k, v in LLAMA_3_8B.items() if k != "rms_norm_eps"}, "x.json")
    with pytest.raises(ConfigError, match=r"x.json lacks the key 'rms_norm_eps'"):
        draft(LlamaForCausalLM, reader, dtype=torch.float32)


def test_kv_heads_must_divide_the_heads() -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads=5 must divide .*heads=32"):
        drafted(num_key_value_heads=5)


def test_layer_types_name_every_layer_with_a_known_type() -> None:
    for types in (["full_attention"], ["full_attention"] * 31 + ["linear_attention"]):
        with pytest.raises(ConfigError, match="must name full_attention or sliding_attention"):
            drafted(Qwen2ForCausalLM, layer_types=types, use_sliding_window=False)


def test_query_and_kv_heads_go_to_one_group_of_ranks() -> None:
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.attn: query heads and KV heads"):
        drafted(mesh=Mesh(groups={"heads": Solo(0, 2)}))


def test_layers_of_equal_rope_share_one_table() -> None:
    found = drafted(num_hidden_layers=3)
    assemble(
        found,
        chosen_parts(found),
        ReferenceStep(),
        device=torch.device("cpu"),
        max_positions=100,
    )
    tables = [layer.table for layer in found.attention]
    assert {table.shape for table in tables} == {(100, 2, 64)}
    assert len({table.data_ptr() for table in tables}) == 1


class Recorder:
    """A scheme that keeps all weights dense and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[tuple[int, int], Role]] = {}

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        assert name not in self.asked
        self.asked[name] = shape, role
        return None


def test_a_scheme_is_asked_for_each_logical_weight_in_whole_and_once() -> None:
    scheme = Recorder()
    found = drafted(mesh=Mesh.tensor_parallel(Solo(1, 8)), scheme=scheme, num_hidden_layers=1)
    block = "model.layers.0"
    assert scheme.asked == {
        f"{block}.self_attn.q_proj": ((4096, 4096), "linear"),
        f"{block}.self_attn.k_proj": ((1024, 4096), "linear"),
        f"{block}.self_attn.v_proj": ((1024, 4096), "linear"),
        f"{block}.self_attn.o_proj": ((4096, 4096), "linear"),
        f"{block}.mlp.gate_proj": ((14336, 4096), "linear"),
        f"{block}.mlp.up_proj": ((14336, 4096), "linear"),
        f"{block}.mlp.down_proj": ((4096, 14336), "linear"),
        "lm_head": ((128256, 4096), "head"),
    }
    assert found.formats() == {"linear": {DENSE.yields}, "expert": set()}


class Lists(Recorder):
    """A scheme that says what of its lists is missing."""

    def unmet(self, modules: Collection[str]) -> list[str]:
        wanted = ["lm_head", "model.norm", "model.layers.0.mlp.up_proj", "model.layers.1", "visual"]
        return [name for name in wanted if name not in modules]


def test_a_scheme_may_say_which_names_of_its_lists_mean_nothing() -> None:
    for tied in (False, True):
        found = drafted(scheme=Lists(), num_hidden_layers=1, tie_word_embeddings=tied)
        assert found.unmet() == ["model.layers.1", "visual"]
    for scheme in (Recorder(), None):
        assert drafted(scheme=scheme, num_hidden_layers=1).unmet() == []


def test_a_model_of_its_own_may_be_no_language_model() -> None:
    class Plain(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids

    found = draft(lambda c: Plain(), ConfigReader({}), dtype=torch.float32)
    assert (found.sockets, found.attention, found.weight_bytes) == ((), (), 0)
