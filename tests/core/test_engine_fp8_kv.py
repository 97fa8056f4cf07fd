"""An engine with an FP8 KV cache: what it holds and answers, and what it says of its scales."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import edit_config, edit_tensors, tiny_checkpoint
from tests.helpers.engines import assert_idle, greedy, rows, tiny_engine, tokens_of
from tests.helpers.mounting import mount_reference, plugins
from torch import Tensor

from rackmount.config import EngineConfig
from rackmount.execution.saturation import misfits
from rackmount.report import startup_report
from rackmount_registry import hookimpl
from rackmount_registry.attention import FP8, KVCache
from rackmount_registry.config import ConfigReader
from rackmount_registry.descriptors import QuantizationScheme
from rackmount_registry.errors import CheckpointError, ConfigError, SelectionError
from rackmount_registry.formats import KVCacheScheme
from rackmount_registry.plugins import PluginManager

FP8_KV: dict[str, Any] = {"kv_cache_dtype": "fp8"}
PROMPTS = rows(9, 1, 23, 4, 17)
SCALES = {"k_scale": 0.02, "v_scale": 0.03}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that says nothing of its KV cache."""
    return tiny_checkpoint(tmp_path_factory.mktemp("plain"), "qwen3")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with scales."""
    folder, _ = tiny_checkpoint(tmp_path_factory.mktemp("scaled"), "qwen3")
    edit_tensors(folder, add_scales)
    return folder


def add_scales(tensors: dict[str, Tensor]) -> None:
    for layer in range(2):
        for name, value in SCALES.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([value * (1 + layer)])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_token_takes_a_byte_for_each_number(folder: Path, dtype: str) -> None:
    engine = tiny_engine(folder, dtype=dtype, num_kv_blocks=10, **FP8_KV)
    assert engine.rack.kv_bytes_per_token == 2 * 2 * 2 * 128  # layers, both, KV heads, head size
    assert engine.core.kv_bytes == 10 * 4 * 1024
    own = tiny_engine(folder, dtype=dtype, num_kv_blocks=10, kv_cache_dtype="model")
    assert own.core.kv_bytes == engine.core.kv_bytes * getattr(torch, dtype).itemsize


def test_the_budget_holds_as_many_more_blocks(folder: Path) -> None:
    budget = {"num_kv_blocks": None, "kv_cache_memory_bytes": 2**18, "dtype": "bfloat16"}
    fp8 = tiny_engine(folder, **budget, **FP8_KV)
    own = tiny_engine(folder, **budget, kv_cache_dtype="model")
    assert (fp8.core.num_kv_blocks, own.core.num_kv_blocks) == (64, 32)


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"long_prefill_token_threshold": 3},
        {"num_kv_blocks": 12},
        {"num_kv_blocks": 12, "enable_prefix_caching": False, "max_num_batched_tokens": 8},
    ],
    ids=["whole", "chunks", "short chunks", "preempted", "preempted chunks"],
)
def test_any_schedule_gives_the_answers_of_the_reference(
    folder: Path, schedule: dict[str, Any]
) -> None:
    engine = tiny_engine(folder, dtype="float64", **FP8_KV, **schedule)
    answers = tokens_of(engine, PROMPTS, greedy(12))
    assert tokens_of(engine, PROMPTS, greedy(12)) == answers  # prefix hits, where there are any
    assert_idle(engine)
    cache = KVCache(dtype=FP8)
    reference = mount_reference(folder, dtype=torch.float64, kv_cache=cache)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = reference.logits(torch.tensor(prompt + answer[:-1]))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer


def test_the_cache_is_what_the_answers_come_from(folder: Path) -> None:
    """Or the test above would pass with a cache of another dtype."""
    fp8 = tiny_engine(folder, dtype="float64", **FP8_KV)
    own = tiny_engine(folder, dtype="float64", kv_cache_dtype="model")
    assert tokens_of(fp8, PROMPTS, greedy(12)) != tokens_of(own, PROMPTS, greedy(12))


def test_scales_are_never_dropped_in_silence(folder: Path, plain: Path) -> None:
    with pytest.raises(
        CheckpointError, match="no quantization_config of it speaks of the KV cache; choose"
    ):
        tiny_engine(folder)
    with pytest.raises(CheckpointError, match="2 of 2 attention layers have no scales"):
        tiny_engine(plain, **FP8_KV)
    with pytest.raises(CheckpointError, match="leave kv_scale out"):
        tiny_engine(folder, kv_scale=1.0, **FP8_KV)
    with pytest.raises(ConfigError, match=r"kv_scale=2\.0 is for an FP8 KV cache"):
        tiny_engine(plain, kv_scale=2.0)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"kv_cache_dtype": "fp9"}, r"'fp9' \(did you mean 'fp8'\?\) must be one of auto, model,"),
        ({"kv_scale": 0.0}, "kv_scale=0.0 must be a number of float32, from 1.2e-38 to 3.4e\\+38"),
        ({"kv_scale": float("nan")}, "kv_scale=nan must be a number of float32"),
        ({"kv_scale": float("inf")}, "kv_scale=inf must be a number of float32"),
        ({"kv_scale": 1e39}, "must be a number of float32"),
        ({"kv_scale": 1e-46}, "must be a number of float32"),
    ],
)
def test_values_that_mean_nothing_are_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        EngineConfig.create(model="m", **given)


def test_a_backend_that_reads_no_fp8_cache_is_refused_with_the_reason(plain: Path) -> None:
    with pytest.raises(SelectionError, match="kv_dtype=float8_e4m3fn is not one of bfloat16"):
        tiny_engine(plain, backend="flash-attn", kv_scale=1.0, **FP8_KV)


def test_the_report_says_where_scales_come_from_and_that_they_hold(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(folder, **FP8_KV)
    report = startup_report(engine.rack, engine.core, engine.manager)
    assert (
        "KV cache in float8_e4m3fn, scales: the checkpoint's, which must have one for each layer"
        in report
    )
    assert any(line.startswith("KV scales hold 64 random tokens: no layer") for line in report)
    assert not caplog.records
    own = tiny_engine(folder, kv_cache_dtype="model")
    assert not any("scales" in line for line in startup_report(own.rack, own.core, own.manager))


def test_saturation_is_told_by_layer_and_share(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = tiny_engine(plain, kv_scale=1e-6, **FP8_KV)
    assert all(min(shares[:2]) > 0.9 for shares in engine.core.saturation)
    told = "KV scales are too small in 2 of 2 layers: of 64 random tokens"
    (record,) = caplog.records
    assert record.getMessage().startswith(told)
    report = startup_report(engine.rack, engine.core, engine.manager)
    assert "KV cache in float8_e4m3fn, scales: 1e-06 for all" in report
    (line,) = (line for line in report if line.startswith("WARNING"))
    assert told in line and "layer 0 (" in line and "kv_cache_dtype='model'" in line


def test_a_channel_at_its_calibrated_largest_tells_of_no_scale_too_small() -> None:
    one_of_a_head = 1 / 128
    within = [(one_of_a_head, 0.0, 0.0, 0.09), (0.0, one_of_a_head, 0.09, 0.0)]
    assert misfits(within, 64) == []
    (told,) = misfits([(0.0, 0.0, 0.0, 0.0), (0.0, 0.02, 0.0, 0.0)], 64)
    assert "in 1 of 2 layers" in told
    assert "stored as the largest FP8 number: layer 1 (0.00%, 2.00%);" in told


def test_a_scale_that_leaves_nothing_is_told(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = tiny_engine(plain, kv_scale=1e20, **FP8_KV)
    assert engine.core.saturation == [(0.0, 0.0, 1.0, 1.0)] * 2
    (record,) = caplog.records
    told = record.getMessage()
    assert told.startswith("KV scales are too large in 2 of 2 layers: of 64 random tokens")
    assert "stored as 0: layer 0 (100.00%, 100.00%)" in told and "a smaller kv_scale" in told
    assert f"WARNING: {told}" in startup_report(engine.rack, engine.core, engine.manager)


def test_the_share_is_that_of_numbers_beyond_the_scale(plain: Path) -> None:
    """Counted from what the reference would store."""
    scale = 0.004
    engine = tiny_engine(plain, dtype="float64", kv_scale=scale, **FP8_KV)
    cache = KVCache(dtype=FP8, scale=scale)
    reference = mount_reference(plain, dtype=torch.float64, kv_cache=cache)
    seen: list[list[float]] = []
    for layer in reference.mounted.draft.attention:
        store = layer.store

        def record(q: Tensor, k: Tensor, v: Tensor, stored: Tensor, slots: Tensor, store=store):
            q = store(q, k, v, stored, slots)
            seen.append((stored.float().abs() == 448).double().mean((1, 2, 3)).tolist())
            return q

        layer.store = record  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        reference.hidden(torch.randint(97, (4,), generator=generator))
    expected = torch.tensor(seen).view(200, 2, 2).mean(0)
    found = torch.tensor(engine.core.saturation)[:, :2]
    assert float(expected.min()) > 0.01 and float(expected.max()) < 0.99
    torch.testing.assert_close(found, expected, rtol=0.3, atol=0.05)


def test_the_check_leaves_no_trace_in_the_load_of_experts(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe")
    engine = tiny_engine(folder, kv_scale=0.05, **FP8_KV)
    assert not any(layer.tokens.any() for layer in engine.core.expert_load())
    engine.generate([[1, 2, 3]], greedy(2))
    assert all(layer.tokens.any() for layer in engine.core.expert_load())


class Scheme:
    """Dense weights, and a KV cache in FP8."""

    kv_cache = KVCacheScheme(per="head")

    def __init__(self, config: ConfigReader) -> None:
        config.get("quant_method")
        config.require_all_read()

    def format_for(self, name: str, shape: tuple[int, int], role: str) -> None:
        return None


@hookimpl
def quantization_schemes() -> list[QuantizationScheme]:
    return [QuantizationScheme(name="kv", factory=f"{__name__}:Scheme", summary="", claims=("kv",))]


def test_what_the_checkpoint_says_is_done(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    edit_config(folder, lambda config: config.update(quantization_config={"quant_method": "kv"}))
    scales = {"k_scale": torch.full((2, 1, 1), 0.05), "v_scale": torch.full((2, 1, 1), 0.04)}
    edit_tensors(
        folder,
        lambda tensors: tensors.update(
            (f"model.layers.{layer}.self_attn.{name}", scale.clone())
            for layer in range(2)
            for name, scale in scales.items()
        ),
    )
    hooks = SimpleNamespace(quantization_schemes=quantization_schemes)
    manager = plugins() + PluginManager.from_modules({"kv": hooks})
    engine = tiny_engine(folder, manager=manager)
    assert engine.rack.kv_dtype == FP8
    assert len(tokens_of(engine, PROMPTS, greedy(3))) == len(PROMPTS)
    report = startup_report(engine.rack, engine.core, engine.manager)
    assert (
        "KV cache in float8_e4m3fn, scales: the checkpoint's, which must have one for each KV head"
        in report
    )
    asked = tiny_engine(folder, manager=manager, kv_cache_dtype="model")
    assert asked.rack.kv_dtype == torch.float32
    with pytest.raises(SelectionError, match="no head_scales"):
        tiny_engine(folder, manager=manager, backend="flashinfer")


def test_random_weights_need_no_scales(plain: Path) -> None:
    engine = tiny_engine(plain, load_format="dummy", **FP8_KV)
    assert engine.rack.draft.kv_cache.scale == 1.0
    assert len(engine.generate([[1, 2, 3]], greedy(4))[0].token_ids) == 4
