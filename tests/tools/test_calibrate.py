"""Calibrated checkpoints: scales against what transformers caches, weights against the plain ones,
and both as other libraries read them."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.transform import TransformConfig, apply_transform_config
from safetensors.torch import load_file
from tests.helpers.checkpoints import edit_tensors, oracle_logits, tiny_checkpoint
from tests.helpers.engines import NUM_BYTE_IDS, byte_tokenizer
from tests.helpers.mounting import mount_reference, plugins
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from rackmount import Engine, EngineConfig, SamplingParams
from rackmount.cli.app import build_app
from rackmount.report import kv_scales
from rackmount_registry.attention import mapped
from rackmount_registry.config import ConfigReader
from rackmount_registry.descriptors import QuantizationScheme
from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_tools.calibration import Calibration, write_calibrated
from rackmount_tools.checkpoint_folder import new_folder, write_tensors
from rackmount_tools.compressed_config import key_map_names

TEXT = "So she was considering, in her own mind — as well as she could."
IDS = list(TEXT.encode())
LONG_TEXT = 12 * TEXT
"""Enough for maps of keys."""
CONTEXT = 24
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": NUM_BYTE_IDS}
"""Whole blocks of 128 and groups of 32."""


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    return source_of(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of(tmp_path_factory.mktemp("llama"), "llama")[0]


def source_of(folder: Path, family: str) -> tuple[Path, PreTrainedModel]:
    folder, model = tiny_checkpoint(folder, family, **SIZES)
    byte_tokenizer().save_pretrained(folder)
    return folder, model


def calibrated(
    source: Path, out: Path, asked: Mapping[str, Any], **others: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its tensors and its config."""
    config = EngineConfig.create(
        model=str(source), max_model_len=CONTEXT, device="cpu", kv_cache_dtype="model"
    )
    given = {"text": TEXT} | others
    write_calibrated(config, out, Calibration(**asked), plugins(), **given)
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


def cached(model: PreTrainedModel) -> list[list[Tensor]]:
    """Keys and values of each layer, [heads, tokens, size]."""
    pieces = [IDS[start : start + CONTEXT] for start in range(0, len(IDS), CONTEXT)]
    with torch.inference_mode():
        caches = [model(torch.tensor([ids]), use_cache=True).past_key_values for ids in pieces]
    return [
        [torch.cat([getattr(cache.layers[i], what)[0] for cache in caches], 1) for what in KINDS]
        for i in range(model.config.num_hidden_layers)
    ]


KINDS = ("keys", "values")


def squared_error(x: Tensor, scale: float) -> float:
    """Of x as an FP8 cache holds it."""
    stored = (x.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return (stored.double() * scale - x.double()).pow(2).sum().item()


def assert_best(scale: float, x: Tensor) -> None:
    """A scale holds x, and of the eight in an octave that do none rounds it better."""
    step = math.log2(scale) * 8
    assert step == pytest.approx(round(step), abs=1e-3)
    least = x.abs().max().item() / 448
    assert least <= scale * (1 + 1e-6) and scale <= 2 * least * (1 + 1e-6)
    first = math.ceil(math.log2(least) * 8 - 1e-3)
    errors = [squared_error(x, 2 ** (each / 8)) for each in range(first, first + 8)]
    assert squared_error(x, scale) <= min(errors) * 1.001


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_kv_scales_round_what_is_cached_best(
    source: tuple[Path, PreTrainedModel], tmp_path: Path, per: str
) -> None:
    folder, model = source
    tensors, config = calibrated(folder, tmp_path / "out", {"kv_scales": per})
    for index, both in enumerate(cached(model)):
        for name, seen in zip(("k_scale", "v_scale"), both, strict=True):
            scale = tensors.pop(f"model.layers.{index}.self_attn.{name}")
            assert scale.shape == ((1,) if per == "tensor" else (2, 1, 1))
            parts = [seen] if per == "tensor" else list(seen)
            for each, part in zip(scale.flatten().tolist(), parts, strict=True):
                assert_best(each, part)
    plain = load_file(folder / "model.safetensors")
    assert tensors.keys() == plain.keys()
    assert all(torch.equal(tensors[name], plain[name]) for name in plain)
    section = config.pop("quantization_config")
    assert section["config_groups"] == {} and section["quant_method"] == "compressed-tensors"
    assert section["kv_cache_scheme"]["strategy"] == {"head": "attn_head"}.get(per, per)
    assert config == json.loads((folder / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("key_maps", [False, True])
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_an_engine_caches_keys_and_values_in_fp8_with_them(
    source: tuple[Path, PreTrainedModel], tmp_path: Path, per: str, key_maps: bool
) -> None:
    folder, model = source
    asked = {"kv_scales": per, "key_maps": key_maps}
    calibrated(folder, tmp_path / "out", asked, text=LONG_TEXT if key_maps else TEXT)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_BYTE_IDS)
    with Engine(tmp_path / "out", manager=plugins(), max_model_len=64, device="cpu") as engine:
        assert engine.rack.kv_dtype == torch.float8_e4m3fn
        entries = engine.generate([IDS[:40]], params)[0].prompt_logprobs
    found = torch.tensor([[e.top[i] for i in range(NUM_BYTE_IDS)] for e in entries[1:]])
    wanted = oracle_logits(model, torch.tensor(IDS[:40]))[:-1].log_softmax(-1)
    off = (found - wanted).pow(2).mean().sqrt() / wanted.std()
    assert 1e-4 < off < 0.15


def test_keys_are_mapped_as_the_library_maps_them(llama: Path, tmp_path: Path) -> None:
    """By the modules that it makes of the configuration."""
    asked = {"kv_scales": "head", "key_maps": True}
    tensors, config = calibrated(llama, tmp_path / "out", asked, text=LONG_TEXT)
    section = config["quantization_config"]["transform_config"]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    apply_transform_config(model, TransformConfig.model_validate(section))
    random = torch.Generator().manual_seed(0)
    for layer in range(2):
        given, found = torch.randn(2, 7, 3, 32, generator=random), []
        for name, x in zip(key_map_names(layer), given, strict=True):
            path = f"model.layers.{layer}.self_attn.{name}"
            assert path in model.state_dict()
            matrix = tensors[path]
            assert (matrix @ matrix.T - torch.eye(32)).abs().max() > 0.1, "a rotation alone"
            module = model.get_submodule(path.removesuffix(".weight"))
            module.weight = torch.nn.Parameter(matrix)
            found.append(module(x).detach())
            torch.testing.assert_close(found[-1], mapped(x, matrix))
        scores = [torch.einsum("tnd,tnd->tn", q, k) for q, k in (found, given)]
        torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


def test_maps_go_with_the_scales_that_were_found_without_them(llama: Path, tmp_path: Path) -> None:
    first, config = calibrated(
        llama,
        tmp_path / "1",
        {"kv_scales": "head", "key_maps": True, "weights": "fp8"},
        text=LONG_TEXT,
    )
    assert len(config["quantization_config"]["transform_config"]["config_groups"]) == 4
    plain, _ = calibrated(llama, tmp_path / "2", {"kv_scales": "head", "weights": "fp8"})
    (tmp_path / "text").write_text(TEXT)
    asked = ["calibrate", str(tmp_path / "1"), "--data", str(tmp_path / "text"), "--out"]
    asked += [str(tmp_path / "3"), "--device", "cpu", "--context", str(CONTEXT)]
    outcome = CliRunner().invoke(build_app(plugins()), [*asked, "--kv-scales", "head"])
    assert "maps of keys are left out" in outcome.output, outcome.output
    again = load_file(tmp_path / "3" / "model.safetensors")
    config = json.loads((tmp_path / "3" / "config.json").read_text())
    assert "transform_config" not in config["quantization_config"]
    assert again.keys() == plain.keys() < first.keys()
    with Engine(tmp_path / "1", manager=plugins(), max_model_len=64, device="cpu") as engine:
        assert any("keys and queries mapped" in line for line in kv_scales(engine.rack))
        assert all(layer.key_maps is not None for layer in engine.rack.draft.attention)
    given = {"max_model_len": 64, "device": "cpu", "kv_cache_dtype": "model"}
    with Engine(tmp_path / "1", manager=plugins(), **given) as engine:
        left = ["KV cache in float32: the checkpoint's FP8 scales are not used"]
        assert kv_scales(engine.rack) == left


WEIGHTS = {
    "fp8": 0.03,
    "fp8-tensor": 0.03,
    "fp8-block": 0.03,
    "int8": 0.01,
    "int4": 0.1,
    "int4-asym": 0.1,
}
"""Name -> how far rounded weights are from the plain ones at most, relative to their size."""


def asked_for(weights: str) -> dict[str, Any]:
    """What is asked for to get such weights alone, in groups that fit tiny models."""
    groups = {"group_size": 32} if weights.startswith("int4") else {}
    return {"weights": weights, "kv_scales": "none"} | groups


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_rounded_and_read_back(
    source: tuple[Path, PreTrainedModel], tmp_path: Path, weights: str
) -> None:
    folder, model = source
    asked = asked_for(weights)
    tensors, config = calibrated(folder, tmp_path / "out", asked, text=None)
    plain = load_file(folder / "model.safetensors")
    for name in plain:
        if "_proj" not in name:
            assert torch.equal(tensors[name], plain[name])
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)] if "moe" in str(folder) else []
    section = config["quantization_config"]
    assert section["ignore"] == [*routers, "lm_head"]
    QuantizationConfig.model_validate(section)
    for name, dense in plain.items():
        if "_proj" in name:
            off = dequantized(name.removesuffix(".weight"), dense.shape, tensors, section) - dense
            assert off.norm() < WEIGHTS[weights] * dense.norm()
    ids = torch.tensor(IDS[:24])
    found, wanted = mount_reference(tmp_path / "out").logits(ids), oracle_logits(model, ids)
    assert 1e-4 < (found - wanted).norm() / (wanted - wanted.mean()).norm() < 0.7


def dequantized(
    name: str, shape: torch.Size, tensors: Mapping[str, Tensor], section: Mapping[str, Any]
) -> Tensor:
    """What the scheme makes of one weight."""
    scheme = (
        plugins().claimed(QuantizationScheme, "compressed-tensors").load()(ConfigReader(section))
    )
    stored = scheme.format_for(name, tuple(shape), "linear")
    rows = shape[0]
    given = {slot.suffix: tensors[f"{name}.{slot.suffix}"] for slot in stored.slots}
    if stored.yields in ("fp8_rows", "int8_rows") and len(given["weight_scale"]) == rows:
        assert given["weight_scale"].shape == (rows, 1)  # as compressed-tensors lays it
        given["weight_scale"] = given["weight_scale"].squeeze(1)
    return stored.finish(given, (rows,), shape[1]).dequantize()


# transformers 5.24 makes room for zero points that are not packed, and loads none that are: these
# are held to compressed-tensors itself in tests/quant.
@pytest.mark.parametrize("weights", ["fp8", "fp8-tensor", "fp8-block", "int8", "int4"])
def test_transformers_reads_the_same_weights(llama: Path, tmp_path: Path, weights: str) -> None:
    asked = asked_for(weights)
    tensors, config = calibrated(llama, tmp_path / "out", asked, text=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        model(torch.tensor([IDS[:4]]))  # its first step unpacks them
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            ours = dequantized(name, module.weight.shape, tensors, config["quantization_config"])
            torch.testing.assert_close(module.weight.float(), ours, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("weights", "limit"), [("fp8", 448), ("fp8-tensor", 448), ("int8", 127)])
def test_static_scales_are_of_the_inputs_that_were_seen(
    llama: Path, tmp_path: Path, weights: str, limit: int
) -> None:
    asked = {"weights": weights, "activations": "static", "kv_scales": "none"}
    tensors, config = calibrated(llama, tmp_path / "out", asked)
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["strategy"] == "tensor"
    assert group["input_activations"]["dynamic"] is False
    model, seen = AutoModelForCausalLM.from_pretrained(llama).eval(), dict[str, float]()

    def look(name: str, module: torch.nn.Module, given: tuple[Tensor]) -> None:
        seen[name] = max(seen.get(name, 0), given[0].abs().max().item())

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(partial(look, name))
    for start in range(0, len(IDS), CONTEXT):
        with torch.inference_mode():
            model(torch.tensor([IDS[start : start + CONTEXT]]))
    found = {
        name.removesuffix(".input_scale"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".input_scale")
    }
    assert found.keys() == seen.keys()
    for name, scale in found.items():
        assert scale.shape == (1,)
        assert scale.item() * limit == pytest.approx(seen[name], rel=1e-5)
    mount_reference(tmp_path / "out")


def test_scales_of_a_cache_are_replaced_and_added_to_rounded_weights(
    llama: Path, tmp_path: Path
) -> None:
    rounded, _ = calibrated(
        llama, tmp_path / "1", {"weights": "fp8", "kv_scales": "tensor"}, max_tokens=4
    )
    again, config = calibrated(tmp_path / "1", tmp_path / "2", {"kv_scales": "head"})
    names = {name for name in rounded if name.endswith(("k_scale", "v_scale"))}
    assert len(names) == 4 and names == {
        name for name in again if "self_attn.k_s" in name or "self_attn.v_s" in name
    }
    assert all(rounded[name].shape == (1,) and again[name].shape == (2, 1, 1) for name in names)
    for name in rounded.keys() - names:
        assert torch.equal(rounded[name].view(torch.uint8), again[name].view(torch.uint8))
    section = config["quantization_config"]
    assert section["kv_cache_scheme"]["strategy"] == "attn_head"
    assert section["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    with pytest.raises(ConfigError, match=r"quantized already \('compressed-tensors'\)"):
        calibrated(tmp_path / "1", tmp_path / "3", {"weights": "int8"})
    edit_tensors(tmp_path / "1", respelled)
    other, _ = calibrated(tmp_path / "1", tmp_path / "4", {"kv_scales": "head"})
    assert other.keys() == again.keys()


def respelled(tensors: dict[str, Tensor]) -> None:
    """Scales as ModelOpt calls them."""
    for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
        role = name[-len("k_scale")]
        tensors[name.replace(f".{role}_scale", f".{role}_proj.{role}_scale")] = tensors.pop(name)


def test_experts_that_are_stored_together_are_rounded_one_by_one(tmp_path: Path) -> None:
    folder, _ = source_of(tmp_path / "apart", "qwen3-moe")
    apart, _ = calibrated(folder, tmp_path / "1", {"weights": "fp8", "kv_scales": "none"})
    edit_tensors(folder, together)
    assert any(
        name.endswith("experts.gate_up_proj") for name in load_file(folder / "model.safetensors")
    )
    rounded, _ = calibrated(folder, tmp_path / "2", {"weights": "fp8", "kv_scales": "none"})
    assert rounded.keys() == apart.keys()
    for name in apart:
        assert torch.equal(rounded[name].view(torch.uint8), apart[name].view(torch.uint8))


def together(tensors: dict[str, Tensor]) -> None:
    """The experts of each layer as transformers 5 may save them."""
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        if f"{path}.gate_up_proj" in tensors:
            continue
        count = len([name for name in tensors if name.startswith(path) and "up_proj" in name])
        gate, up, down = (
            torch.stack([tensors.pop(f"{path}.{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{path}.gate_up_proj"], tensors[f"{path}.down_proj"] = (
            torch.cat((gate, up), 1),
            down,
        )


def test_data_may_be_unlucky(llama: Path, tmp_path: Path) -> None:
    source = copytree(llama, tmp_path / "source")

    def dead(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
        tensors["model.layers.0.self_attn.v_proj.weight"][:32] = 0

    edit_tensors(source, dead)
    tensors, _ = calibrated(source, tmp_path / "out", {"kv_scales": "head"})
    assert tensors["model.layers.1.self_attn.v_scale"].flatten().tolist() == [1, 1]
    first, second = tensors["model.layers.0.self_attn.v_scale"].flatten().tolist()
    assert first == 1 != second
    edit_tensors(
        source, lambda all: all["model.layers.1.input_layernorm.weight"].fill_(float("nan"))
    )
    with pytest.raises(RackmountError, match="keys of layer 1 reach nan on this data"):
        calibrated(source, tmp_path / "nan", {"kv_scales": "tensor"})


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"kv_scales": "heads"}, r"kv_scales='heads' \(did you mean 'head'\?\) must be one of"),
        ({"weights": "fp4"}, "weights='fp4' .* must be one of fp8, fp8-tensor, fp8-block, int8,"),
        ({"activations": "none"}, "activations='none' must be one of dynamic, static"),
        ({"kv_scales": "none"}, "kv_scales='none' and weights='none' leave nothing to do"),
        ({"kv_scales": "none", "key_maps": True, "weights": "fp8"}, "key_maps=True maps keys for"),
        ({"weights": "int4", "activations": "static"}, "one scale with weights=fp8, fp8-tensor"),
        ({"activations": "static"}, "activations='static' with weights='none'"),
        (
            {"weights": "int8", "group_size": 64},
            "group_size=64 with weights='int8': groups .* with weights=int4, int4-asym",
        ),
        ({"group_size": 128}, "group_size=128 with weights='none'"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        Calibration(**asked)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    folder, _ = source_of(tmp_path / "source", "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name][3, 4].fill_(math.nan))
    with pytest.raises(RackmountError, match=r"up_proj.weight\S* would not be finite"):
        calibrated(folder, tmp_path / "out", {"weights": "fp8", "kv_scales": "none"})
    assert not (tmp_path / "out").exists()


def test_what_a_model_cannot_is_refused(llama: Path, tmp_path: Path) -> None:
    calibrated(llama, tmp_path / "fp8", {"kv_scales": "head"})
    config = EngineConfig.create(model=str(tmp_path / "fp8"), max_model_len=CONTEXT, device="cpu")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='auto' makes the cache FP8, .*='model'"):
        write_calibrated(config, tmp_path / "2", Calibration(), plugins(), text=TEXT)
    with pytest.raises(RackmountError, match=r"has 8 keys a layer, .* need 768 or more"):
        calibrated(llama, tmp_path / "3", {"key_maps": True}, max_tokens=4)
    moe, _ = source_of(tmp_path / "moe", "qwen3-moe")
    static = {"weights": "fp8", "activations": "static"}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder, out, asked, others, refusal in (
        (moe, "1", static, {}, "the second product of an expert takes what no layer shows"),
        (llama, "2", {}, {"text": None}, "data is needed to find scales.* choose kv_scales='none'"),
        (llama, "full", {}, {}, "must be an empty folder, or none yet"),
        (llama, "full/file", {}, {}, "must be a folder"),
        (llama, "3", {"weights": "int4", "group_size": 48}, {}, "group_size=48 must divide"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            calibrated(folder, tmp_path / out, asked, **others)
    assert {each.name for each in tmp_path.iterdir()} == {"fp8", "moe", "full"}  # nothing is left
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (moe / name).unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        calibrated(moe, tmp_path / "4", {})


@pytest.mark.parametrize("asked", [{"weights": "int4"}, {"weights": "int4-asym"}])
def test_weights_that_do_not_fit_a_format_are_refused_before_any_is_read(
    llama: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    stages: list[str] = []
    with pytest.raises(
        ConfigError, match=r"group_size=48 must divide the columns of .*, which are 128"
    ):
        calibrated(
            llama,
            tmp_path / "out",
            asked | {"group_size": 48},
            report=lambda stage, done, total: stages.append(stage),
        )
    assert stages == []


def test_of_two_runs_at_once_one_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_folder(tmp_path / "out") as folder:
        assert [each.name for each in folder.iterdir()] == [".incomplete"]
        with pytest.raises(ConfigError, match="must be an empty folder"), new_folder(folder):
            pytest.fail("has it, too")
        with monkeypatch.context() as patched:  # both find it empty
            patched.setattr(Path, "iterdir", lambda self: iter(()))
            with pytest.raises(ConfigError, match="must be an empty folder"), new_folder(folder):
                pytest.fail("has it, too")
        (folder / "model").touch()
    assert [each.name for each in folder.iterdir()] == ["model"]


def test_tensors_go_to_shards_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((256,), float(i)) for i in range(5)}
    write_tensors(tmp_path, tensors.items(), most=2048)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 1024
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
