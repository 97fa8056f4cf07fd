import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rackmount.plugin
import rackmount_backends.plugin
import rackmount_executors.plugin
import rackmount_models.plugin
import rackmount_quant.plugin
from rackmount.cli.app import build_app
from rackmount.execution.memory import size
from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import AttentionBackend, CheckpointReader
from rackmount_registry.plugins import PluginManager

Result = Any

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
VENDOR = AttentionBackend(
    name="quick",
    factory="no.such.module:Backend",
    band="vendor",
    cache_layout="slots",
    preferred_block_sizes=(64,),
    cells=(Cell(devices=("cuda",), compute_capability=(9, 0), dtypes=("bfloat16",)),),
)
PLUGINS = {
    "rackmount-core": rackmount.plugin,
    "rackmount-plugins-backends": rackmount_backends.plugin,
    "rackmount-plugins-executors": rackmount_executors.plugin,
    "rackmount-plugins-models": rackmount_models.plugin,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that holds a config.json and no weights."""
    return write(tmp_path / "model", QWEN3_0_6B)


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def explain(model: Path | str, *args: str, plugins: dict[str, Any] = PLUGINS) -> Result:
    app = build_app(PluginManager.from_modules(plugins))
    return CliRunner().invoke(app, ["explain", str(model), *args])


def figures(model: Path | str, *args: str, ends: int = 0, **values: Any) -> dict[str, Any]:
    result = explain(model, *args, "--json", **values)
    assert (result.exit_code, result.stderr) == (ends, "")
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.mark.parametrize(
    ("config", "kibibytes", "num_weights"),
    [
        (QWEN3_0_6B, 112, 596_049_920),
        (LLAMA_3_8B, 128, 8_030_261_248),
        (LLAMA_3_70B, 320, 70_553_706_496),
    ],
)
def test_kv_bytes_per_token_of_well_known_models_in_bfloat16(
    tmp_path, config, kibibytes, num_weights
):
    folder = write(tmp_path / "model", config)
    content = figures(folder, "--memory-gib", "160")
    assert content["dtype"] == "bfloat16"
    assert content["kv_bytes_per_token"]["bfloat16"] == kibibytes * 1024
    assert content["kv_bytes_per_token"]["float32"] == kibibytes * 2048
    assert content["weight_bytes"] == 2 * num_weights
    text = explain(folder).stdout
    assert f"KV per token: {kibibytes} KiB in bfloat16" in text
    weights = f"weights: {size(2 * num_weights)} by the configuration; tensors are not read\n"
    assert weights in text


def test_an_fp8_cache_takes_half_and_its_scales_are_named(folder):
    args = ["--kv-cache-dtype", "fp8", "--memory-gib", "80"]
    content, own = figures(folder, *args), figures(folder, "--memory-gib", "80")
    assert (content["kv_dtype"], own["kv_dtype"]) == ("float8_e4m3fn", "bfloat16")
    assert content["kv_bytes_per_token"]["float8_e4m3fn"] == 56 * 1024
    assert content["num_kv_blocks"] // 2 == own["num_kv_blocks"]
    text = explain(folder, *args).stdout
    assert "KV per token: 56 KiB in float8_e4m3fn (" in text and "112 KiB in bfloat16" in text
    assert (
        "KV cache in float8_e4m3fn, scales: the checkpoint's, which must have one for each layer\n"
        in text
    )
    given = explain(folder, *args, "--kv-scale", "0.5").stdout
    assert "KV cache in float8_e4m3fn, scales: 0.5 for all\n" in given
    assert "KV cache in" not in explain(folder).stdout
    gpu = explain(folder, *args, "--device", "cuda", "--dtype", "float32").stdout
    assert "attention_backend: torch" in gpu  # triton's kernels widen to 16 bits


def test_weights_that_are_rounded_while_loaded_count_as_held(folder):
    args = ["--quantization", "fp8", "--memory-gib", "80"]
    plugins = PLUGINS | {"rackmount-plugins-quant": rackmount_quant.plugin}
    content = figures(folder, *args, plugins=plugins)
    rows, columns_by_rows = 28 * 12 * 1024, 28 * 15 * 1024 * 1024  # of all products but the head
    assert content["weight_bytes"] == 2 * 596_049_920 - columns_by_rows + 4 * rows


def test_names_that_the_checkpoint_lists_in_vain_are_told(tmp_path):
    ignore = ["lm_head", "model.layer.0.mlp", "model.layers.0.mlp", "model.norm", "re:.*visual"]
    stored = {"quant_method": "w8", "ignore": ignore}
    folder = write(tmp_path / "model", QWEN3_0_6B | {"quantization_config": stored})
    plugins = PLUGINS | {"rackmount-plugins-quant": rackmount_quant.plugin}
    vain = ["model.layer.0.mlp", "re:.*visual"]
    assert figures(folder, plugins=plugins)["unmet_names"] == vain
    told = (
        "quantization_config names 'model.layer.0.mlp', 're:.*visual': no tensor of this model is "
        "meant\n"
    )
    assert told in explain(folder, plugins=plugins).stdout
    stored["ignore"] = ignore[:1]
    folder = write(tmp_path / "other", QWEN3_0_6B | {"quantization_config": stored})
    assert "quantization_config names" not in explain(folder, plugins=plugins).stdout


def test_of_several_ranks_the_first_is_shown_and_how_they_run(folder):
    one, four = figures(folder), figures(folder, "--tp", "4", "--memory-gib", "80")
    assert 0.25 < four["weight_bytes"] / one["weight_bytes"] < 0.26
    assert four["kv_bytes_per_token"]["bfloat16"] == 28 * 1024
    sixteen = figures(folder, "--tp", "16")["kv_bytes_per_token"]["bfloat16"]
    assert sixteen == 14 * 1024  # 8 KV heads, each on two ranks
    text = explain(folder, "--tp", "4").stdout
    assert "refused   in-process (rackmount-core 0): max_ranks=1 is below 4" in text
    assert "4 ranks" in text and "executor: multiprocess (rackmount-plugins-executors" in text


def test_more_ranks_than_divide_the_model_are_refused_with_the_legal_numbers(folder):
    result = explain(folder, "--tp", "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "3 ranks do not divide heads=16; choose one of 1, 2, 4, 8, 16" in result.stderr


def test_the_config_file_alone_is_enough(folder):
    assert figures(folder / "config.json")["weight_bytes"] == 2 * 596_049_920


def test_memory_that_is_not_here_can_be_counted_with(folder):
    content = figures(folder, "--device", "cuda", "--memory-gib", "80", "--block-size", "32")
    for_kv = int(80 * 2**30 * 0.9) - content["weight_bytes"]
    assert content["num_kv_blocks"] == for_kv // (32 * 112 * 1024)
    assert content["num_kv_tokens"] == 32 * content["num_kv_blocks"]
    assert content["max_full_requests"] == content["num_kv_tokens"] // 40960
    text = explain(folder, "--device", "cuda", "--memory-gib", "80", "--block-size", "32").stdout
    assert f"KV cache: {content['num_kv_tokens']} tokens" in text
    assert f"at most {content['max_full_requests']} requests of 40960 tokens" in text


def test_full_requests_are_counted_in_whole_blocks_and_at_most_max_num_seqs(folder):
    args = ["--num-kv-blocks", "10", "--block-size", "16", "--max-model-len", "33"]
    assert figures(folder, *args)["max_full_requests"] == 3  # 33 tokens take 3 blocks
    assert figures(folder, *args, "--max-num-seqs", "2")["max_full_requests"] == 2
    text = explain(folder, "--num-kv-blocks", "10", "--block-size", "16").stdout
    assert "KV cache: 160 tokens (10 blocks of 16)" in text
    told = "no request of the full 40960 tokens fits, and answers end before: raise num_kv_blocks, "
    assert f"{told}or lower max_model_len to 160" in text
    refused = explain(folder, "--num-kv-blocks", "10", "--kv-cache-memory-bytes", "100000")
    assert "num_kv_blocks=10 and kv_cache_memory_bytes=100000 are two sizes" in refused.stderr


BFLOAT16 = ("--device", "cuda", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "CUDA graphs: none, cpu has no CUDA graphs"),
        (["--device", "cuda", "--enforce-eager"], "CUDA graphs: none, enforce_eager was asked for"),
        (
            ["--device", "cuda", "--attention-backend", "torch"],
            "CUDA graphs: none, not graph-safe: torch",
        ),
        (
            [*BFLOAT16, "--max-num-seqs", "7"],
            "CUDA graphs: decode steps of 1 to 7 requests (4 sizes), "
            "mixed steps of up to 2048 tokens",
        ),
        (
            [*BFLOAT16, "--max-num-seqs", "1", "--max-graph-tokens", "600"],
            "CUDA graphs: decode steps of 1 to 1 requests (1 sizes), "
            "mixed steps of up to 600 tokens",
        ),
        (
            [*BFLOAT16, "--max-num-seqs", "1", "--max-graph-tokens", "0"],
            "CUDA graphs: decode steps of 1 to 1 requests (1 sizes), no mixed steps",
        ),
    ],
)
def test_it_is_said_which_steps_are_captured_or_why_none_is(folder, args, line):
    assert line in explain(folder, *args).stdout.splitlines()


@pytest.mark.parametrize(
    ("config", "args", "limit"),
    [
        (QWEN3_0_6B, ["--max-num-batched-tokens", "8192"], 2048),
        (QWEN3_0_6B, ["--max-num-batched-tokens", "300"], 300),
        (QWEN3_0_6B, ["--max-model-len", "100"], 100),
        (LLAMA_3_8B, [], 1024),
        (LLAMA_3_70B, [], 256),
    ],
)
def test_mixed_steps_are_captured_as_far_as_the_host_is_slower(tmp_path, config, args, limit):
    folder = write(tmp_path / "model", config)
    lines = explain(folder, *BFLOAT16, "--memory-gib", "200", *args).stdout
    assert f", mixed steps of up to {limit} tokens" in lines
    told = figures(folder, *BFLOAT16, *args)
    assert told["mixed_sizes"][-1] == limit and told["decode_sizes"][0] == 1
    told = figures(folder, *BFLOAT16, *args, "--enforce-eager")
    assert told["mixed_sizes"] == told["decode_sizes"] == []


@pytest.mark.parametrize(
    ("args", "more"),
    [
        (["--memory-gib", "4"], "or more gpu_memory_utilization than 0.9"),
        (["--memory-gib", "80", "--num-kv-blocks", "100"], "or more num_kv_blocks than 100"),
        (
            ["--memory-gib", "80", "--kv-cache-memory-bytes", "1000000000"],
            "or more kv_cache_memory_bytes than 1000000000",
        ),
    ],
)
def test_a_gpu_must_hold_one_request_of_full_length(folder, args, more):
    content = figures(folder, "--device", "cuda", "--block-size", "16", *args, ends=2)
    assert content["num_kv_blocks"] is None
    fits = re.search(r"2560 blocks of KV, and (\d+) are there", content["problem"])
    length = re.search(r"choose max_model_len of at most (\d+)", content["problem"])
    assert fits and length and int(length[1]) == 16 * int(fits[1])
    assert content["problem"].endswith(more)
    enough = figures(folder, "--device", "cuda", *args, "--max-model-len", length[1])
    assert enough["max_full_requests"] == 1


@pytest.mark.parametrize("gib", ["inf", "1e300"])
def test_memory_that_no_machine_has_is_refused(folder, gib):
    result = explain(folder, "--memory-gib", gib)
    assert result.exit_code == 2
    assert f"memory_gib={float(gib)} must be a size that a machine may have" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_said_to_be_so(folder):
    assert "cuda is not here; --memory-gib says" in explain(folder, "--device", "cuda").stdout


def test_weights_that_do_not_fit_are_named_with_both_numbers(folder):
    content = figures(folder, "--memory-gib", "0.5", ends=2)
    assert content["problem"] == (
        "the weights take 1.1 GiB, and 512 MiB of cpu are there; choose fewer bits a weight, or a "
        "machine with more memory"
    )
    assert content["num_kv_blocks"] is None


def test_every_candidate_of_every_kind_is_shown_with_its_verdict(folder):
    result = explain(folder, plugins=PLUGINS | {"vendor": plugin(attention_backends=[VENDOR])})
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    backends = "(rackmount-plugins-backends 0)"
    assert "accepted  qwen3 (rackmount-plugins-models 0)" in lines
    assert "refused   llama (rackmount-plugins-models 0): claims LlamaForCausalLM" in lines
    assert "quantization_scheme: none, as config.json says" in lines
    assert f"linear_kernel for dense: torch {backends}, the only one that fits" in lines
    assert f"attention_backend: torch {backends}, the only one that fits" in lines
    assert "accepted  torch + torch" in lines
    (quick,) = (line for line in lines if line.startswith("refused   quick (vendor 0)"))
    assert "not opted in" in quick and "device=cpu is not one of cuda" in quick


def found(content: dict[str, Any], kind: str) -> list[tuple[str, str | None, str]]:
    """Use, winner and reason of each decision of a kind."""
    return [(d["use"], d["winner"], d["why"]) for d in content["decisions"] if d["kind"] == kind]


def test_the_source_of_a_name_and_the_reader_of_its_files_are_shown(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    lines = [line.strip() for line in explain("qwen3-0.6b").stdout.splitlines()]
    first = (
        "model_source for qwen3-0.6b: aliases (rackmount-plugins-models 0), "
        "whose alias it is, for Qwen/Qwen3-0.6B"
    )
    second = "model_source for Qwen/Qwen3-0.6B: hub (rackmount-core 0), which serves such names"
    assert lines[lines.index(first) + 1 :][:2] == [
        "accepted  aliases (rackmount-plugins-models 0)",
        r"refused   hub (rackmount-core 0): serves \w[\w.-]*/\w[\w.-]*(@[\w.-]+)?",
    ]
    assert lines[lines.index(second) + 1 :][:2] == [
        "refused   aliases (rackmount-plugins-models 0): has no such alias",
        "accepted  hub (rackmount-core 0)",
    ]
    assert "checkpoint_reader: none, the configuration alone is there" in lines
    assert "refused   safetensors (rackmount-core 0): takes *.safetensors" in lines


def test_a_path_needs_no_source_and_one_reader_may_take_it(folder):
    assert found(figures(folder), "model_source") == [(str(folder), "none", "a path that exists")]
    (folder / "model.gguf").touch()
    (folder / "model-1.safetensors").touch()
    (folder / "model-2.safetensors").touch()
    ((_, winner, why),) = found(figures(folder), "checkpoint_reader")
    assert winner == "safetensors (rackmount-core 0)"
    assert why == "which takes model-1.safetensors and 1 more"


def test_files_of_several_formats_are_shown_and_end_with_2(folder):
    reader = CheckpointReader(name="gguf", factory="no.such:reader", patterns=("*.gguf",))
    plugins = PLUGINS | {"gguf": plugin(checkpoint_readers=[reader])}
    (folder / "model.gguf").touch()
    (folder / "model.safetensors").touch()
    result = explain(folder, plugins=plugins)
    assert result.exit_code == 2
    assert "checkpoint_reader: NONE, files of several formats are there; name one" in result.stdout


def test_a_requested_part_that_does_not_fit_shows_all_candidates_and_ends_with_2(folder):
    plugins = PLUGINS | {"vendor": plugin(attention_backends=[VENDOR])}
    result = explain(folder, "--attention-backend", "quick", plugins=plugins)
    assert result.exit_code == 2
    assert "  accepted  torch + torch\n" in result.stdout
    assert "device=cpu is not one of cuda" in result.stdout
    assert result.stderr.startswith("error: the attention_backend asked for")
    result = explain(folder, "--attention-backend", "quick", "--json", plugins=plugins)
    content = json.loads(result.stdout)
    assert result.exit_code == 2
    assert content["error"].startswith("the attention_backend asked for does not fit: quick")
    verdicts = {
        (pair["first"]["name"], pair["second"]["name"]): pair["accepted"]
        for pair in content["candidates"]
    }
    assert verdicts[("torch", "torch")] and not verdicts[("quick", "quick")]


def test_a_requested_part_that_fits_is_taken(folder):
    plugins = PLUGINS | {"vendor": plugin(attention_backends=[VENDOR])}
    args = ["--device", "cuda", "--attention-backend", "vendor:quick", "--memory-gib", "80"]
    content = figures(folder, *args, plugins=plugins)
    (attention,) = (d for d in content["decisions"] if d["kind"] == "attention_backend")
    assert (attention["winner"], attention["why"]) == ("quick (vendor 0)", "requested")
    assert content["block_size"] == 64


def test_a_use_that_nothing_serves_is_shown_and_ends_with_2(folder):
    without_kernels = SimpleNamespace(
        attention_backends=rackmount_backends.plugin.attention_backends,
        op_sets=rackmount_backends.plugin.op_sets,
    )
    result = explain(folder, plugins=PLUGINS | {"rackmount-plugins-backends": without_kernels})
    assert result.exit_code == 2
    assert "linear_kernel for dense: NONE, no linear_kernel fits: none is mounted" in result.stdout
    assert "KV per token: 112 KiB" in result.stdout


def test_an_unknown_backend_is_answered_with_those_mounted(folder):
    result = explain(folder, "--attention-backend", "troch")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'troch' (did you mean 'torch'?); mounted: flash-attn, " in result.stderr


def test_an_unknown_model_is_answered_with_the_nearest_alias():
    result = explain("qwen3-0.7b")
    assert result.exit_code == 2
    assert "did you mean 'qwen3-0.6b'?" in result.stderr and "Traceback" not in result.stderr


def test_an_architecture_that_nobody_claims_is_answered_with_those_that_are(tmp_path):
    folder = write(tmp_path / "model", QWEN3_0_6B | {"architectures": ["MambaForCausalLM"]})
    result = explain(folder)
    assert result.exit_code == 2
    assert "unknown architecture 'MambaForCausalLM'" in result.stderr
    assert "Qwen3ForCausalLM" in result.stderr


def test_of_a_model_on_the_hub_only_the_configuration_is_fetched(folder, monkeypatch):
    asked = []

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.append((repo, options["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert figures("qwen3-0.6b")["weight_bytes"] == 2 * 596_049_920
    (name, files), *others = asked
    assert (name, files[0], others) == ("Qwen/Qwen3-0.6B", "config.json", [])
    assert not any("safetensors" in file or "tokenizer" in file for file in files)


def test_a_model_file_with_its_configuration_inside_is_opened_for_it(tmp_path, monkeypatch):
    closed = []
    checkpoint = SimpleNamespace(config=QWEN3_0_6B, close=lambda: closed.append(True))
    monkeypatch.setattr(
        "rackmount.loading.locate.open_checkpoint", lambda path, manager: checkpoint
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert figures(tmp_path / "model.gguf")["weight_bytes"] == 2 * 596_049_920
    assert closed == [True]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (114688, "112 KiB"),
        (1536, "1.5 KiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_sizes_are_in_binary_units(num_bytes, text):
    assert size(num_bytes) == text


def plugin(**lists: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: hookimpl(lambda value=value: value) for name, value in lists.items()}
    )
