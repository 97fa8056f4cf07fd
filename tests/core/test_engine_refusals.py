"""Engines that must not start, and why they say so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import edit_config, edit_tensors, tiny_checkpoint
from tests.helpers.engines import greedy, rows, tiny_engine
from tests.helpers.mounting import plugins
from torch import Tensor

from rackmount import Engine, SamplingParams
from rackmount_registry import hookimpl
from rackmount_registry.errors import CheckpointError, ConfigError, PluginError, SelectionError
from rackmount_registry.plugins import PluginManager

KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "llama")[0]


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"max_num_seq": 4}, "max_num_seqs"),
        ({"gpu_memory_utilisation": 0.5}, None),
        ({"scheduling_polcy": "fcfs"}, "scheduling_policy"),
        ({"enable_prefix_cache": True}, "enable_prefix_caching"),
    ],
    ids=str,
)
def test_an_unknown_engine_keyword_is_a_type_error_with_the_nearest_name(
    given: dict[str, Any], nearest: str | None, folder: Path
) -> None:
    with pytest.raises(TypeError, match=f"unknown argument '{next(iter(given))}'") as caught:
        Engine(folder, **given)
    assert (f"did you mean '{nearest}'?" in str(caught.value)) == (nearest is not None)
    assert "max_model_len" in str(caught.value)


def test_an_unknown_sampling_keyword_is_a_type_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"'temprature' \(did you mean 'temperature'\?\)"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens=2.5 is not int"),
        ({"num_kv_blocks": -1}, "num_kv_blocks=-1 must be at least 1"),
        ({"block_size": True}, "block_size=True is not int"),
        ({"max_model_len": 65}, "max_model_len=65 is above what the model knows.* at most 64"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1"),
        ({"seed": float("nan")}, "seed=nan is not int"),
        ({"dtype": "float23"}, "dtype='float23'.*'float32'.* must be one of auto, float32"),
        ({"device": "cup"}, "device='cup' must be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda"}, "device=cuda: no GPU is there; choose device='cpu'"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' must be one of fcfs, priority"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' is not bool"),
        ({"auto_plugins": "acme"}, "auto_plugins='acme' is not tuple"),
        ({"auto_plugins": ("acme",)}, "auto_plugins names 'acme', of which no part is mounted"),
        (
            {"kv_cache_memory_bytes": 100, "num_kv_blocks": None},
            "one KV block takes 2 KiB .*=100; choose at least 2048",
        ),
        ({"tp": 3}, "3 ranks do not divide heads=4; choose one of 1, 2, 4"),
        ({"tp": 2, "executor": "in-process"}, "'in-process' takes fewer than 2 .*multiprocess"),
        ({"tp": 2, "device": "cuda:1"}, "'cuda:1' names one device, and tp=2 .* device='cuda'"),
        ({"dp": 2}, "dp=2 is not supported; choose dp=1"),
        ({"ep": 8}, "ep=8 is not supported"),
        (
            {"quantization": "awq"},
            "quantization='awq' is none of the mounted schemes",
        ),
        (
            {"quantization": "FP8"},
            r"quantization='FP8' \(did you mean 'fp8'\?\) .*: fp8; `rackmount calibrate --weights`",
        ),
    ],
    ids=str,
)
def test_an_engine_argument_that_breaks_a_rule_is_refused_with_value_and_rule(
    given: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises((ConfigError, SelectionError), match=message):
        tiny_engine(folder, **given)


@pytest.mark.parametrize("argument", ["backend", "linear_kernel", "op_set"])
def test_an_unknown_part_is_refused_with_the_mounted_ones(argument: str, folder: Path) -> None:
    with pytest.raises((SelectionError, PluginError), match=r"unknown \w+ 'torhc'.*torch"):
        tiny_engine(folder, **{argument: "torhc"})


def test_an_unknown_architecture_lists_the_mounted_ones(folder: Path) -> None:
    edit_config(folder, lambda c: c.update(architectures=["LamaForCausalLM"]))
    with pytest.raises(PluginError) as caught:
        tiny_engine(folder)
    message = str(caught.value)
    assert "unknown architecture 'LamaForCausalLM' (did you mean 'LlamaForCausalLM'?)" in message
    assert "Qwen3ForCausalLM" in message
    assert "a plugin of another distribution, may bring it" in message


def test_an_unknown_architecture_names_the_plugin_that_might_bring_it(folder: Path) -> None:
    manager = PluginManager(
        offer for offer in plugins().offers() if offer.distribution != "rackmount-plugins-models"
    )
    with pytest.raises(PluginError, match="`pip install rackmount-plugins-models`"):
        Engine(folder, manager=manager)


def test_broken_plugins_are_named_where_a_part_is_missing(folder: Path) -> None:
    class Broken:
        @staticmethod
        @hookimpl
        def architectures() -> list[Any]:
            raise RuntimeError("acme's fault")

    edit_config(folder, lambda c: c.update(architectures=["AcmeForCausalLM"]))
    manager = plugins() + PluginManager.from_modules({"acme": Broken})
    with pytest.raises(PluginError, match=r"Broken plugins: acme 0 \(RuntimeError: acme's fault\)"):
        Engine(folder, manager=manager)


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "LlamaForCausalLM"], ids=str)
def test_a_model_has_one_architecture(architectures: object, folder: Path) -> None:
    edit_config(folder, lambda c: c.update(architectures=architectures))
    with pytest.raises(ConfigError, match=r"architectures=.* must be a list of one name"):
        tiny_engine(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(KEY), rf"1 tensors .* not in the checkpoint .*model.safetensors.*{KEY}"),
        (lambda t: t.update(extra=t[KEY].clone()), r"extra in model.safetensors"),
        (
            lambda t: t.update({KEY: t[KEY][:16]}),
            rf"{KEY} in model.safetensors has shape \[16, 64\], the model needs \[32, 64\]",
        ),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_a_checkpoint_that_is_not_the_model_s_is_refused_by_tensor_and_file(
    edit: Callable[[dict[str, Tensor]], object], message: str, folder: Path
) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        tiny_engine(folder)


def test_a_truncated_file_is_refused_by_name(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read.* truncated"):
        tiny_engine(folder)


def test_a_shard_that_the_index_names_and_the_disk_lacks_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {KEY: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index.json names model-00002-of-00002.safetensors"):
        tiny_engine(folder)


def test_a_configuration_key_that_nothing_reads_is_refused(folder: Path) -> None:
    edit_config(folder, lambda c: c.update(soft_cap=30.0))
    with pytest.raises(ConfigError, match="does not read soft_cap"):
        tiny_engine(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model=None is not str"),
        (3, "model=3 is not str"),
        ("", "model='' must be an alias, a hub id"),
    ],
)
def test_what_is_no_name_of_a_model_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(model)


def test_a_model_that_is_nowhere_is_refused_with_the_aliases() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen3-0.6b'.*smollm2-135m"):
        Engine("qwen3-0.6", manager=plugins())


def test_a_refused_engine_keeps_no_file_open(folder: Path) -> None:
    with pytest.raises(ConfigError):
        tiny_engine(folder, max_model_len=65)
    edit_tensors(folder, lambda tensors: None)
    assert len(tiny_engine(folder).generate(rows(3)[0], greedy(2))[0].token_ids) == 2
