"""`rackmount calibrate`: what it reads at a time, and what it says of its scales and of what it
wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import NUM_BYTE_IDS, byte_tokenizer
from tests.helpers.mounting import plugins
from typer.testing import CliRunner

from rackmount.cli.app import build_app

TEXT = "So she was considering, in her own mind — as well as she could."
LONG_TEXT = 12 * TEXT
"""Enough for maps of keys."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It knows 64 positions."""
    return model_of_bytes(tmp_path_factory.mktemp("llama"))


def model_of_bytes(folder: Path, **sizes: int) -> Path:
    tiny_checkpoint(folder, "llama", vocab_size=NUM_BYTE_IDS, **sizes)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(source: Path, out: Path, text: str, *more: str) -> Any:
    data = out.with_suffix(".txt")
    data.write_text(text, encoding="utf-8")
    asked = ["calibrate", str(source), "--data", str(data), "--out", str(out), "--device", "cpu"]
    return CliRunner().invoke(build_app(plugins()), [*asked, *more])


def test_what_is_read_at_a_time_is_by_default_no_more_than_there_is_room_for(
    llama: Path, tmp_path: Path
) -> None:
    outcome = run(llama, tmp_path / "1", "a" * 130)
    assert outcome.exit_code == 0, outcome.output
    assert "scales are of 130 tokens in 3 windows" in outcome.output
    outcome = run(llama, tmp_path / "2", "a" * 130, "--context", "65")
    assert outcome.exit_code == 2
    assert "max_model_len=65 is above what the model knows; choose at most 64" in outcome.output
    large = model_of_bytes(tmp_path / "large", max_position_embeddings=4096)
    outcome = run(large, tmp_path / "3", "a" * 1026)
    assert "scales are of 1026 tokens in 2 windows" in outcome.output, outcome.output


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("size", [999, 1000])
def test_the_command_says_how_much_its_scales_are_of(
    llama: Path, tmp_path: Path, size: int, static: bool
) -> None:
    more = ("--kv-scales", "none", "--weights", "fp8", "--activations", "static") if static else ()
    outcome = run(llama, tmp_path / "out", "a" * size, *more)
    assert outcome.exit_code == 0, outcome.output
    assert f"scales are of {size} tokens in 16 windows" in outcome.output
    few = (
        "WARNING: these are few, and other text may reach further and be cut off; give 1000 tokens"
    )
    assert (few in outcome.output) == (size < 1000)


def test_without_data_it_says_nothing_of_scales(llama: Path, tmp_path: Path) -> None:
    outcome = run(llama, tmp_path / "out", "a", "--kv-scales", "none", "--weights", "fp8")
    assert outcome.exit_code == 0, outcome.output
    assert "scales are of" not in outcome.output and "WARNING" not in outcome.output


@pytest.mark.parametrize(
    ("more", "told", "kinds"),
    [
        (("--kv-scales", "head"), ["one for each KV head", "none rounded"], "25 float32"),
        (
            ("--key-maps", "--kv-scales", "tensor"),
            ["one for each layer, of mapped keys", "none rounded"],
            "29 float32",
        ),
        (
            ("--weights", "int4", "--group-size", "32", "--kv-scales", "none"),
            ["14 rounded to int4 in groups of 32"],
            "21 float32, 14 int32, 14 int64",
        ),
        (
            ("--weights", "fp8", "--activations", "static"),
            ["one for each layer", "14 rounded to fp8, inputs with static scales"],
            "39 float32, 14 float8_e4m3fn",
        ),
    ],
)
def test_the_command_says_what_it_wrote(
    llama: Path, tmp_path: Path, more: tuple[str, ...], told: list[str], kinds: str
) -> None:
    out = tmp_path / "out"
    outcome = run(llama, out, LONG_TEXT, *more)
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.output.splitlines()
    scales = ["KV scales: "] if "none" not in more else []
    for start, each in zip((*scales, "weights: "), told, strict=True):
        assert start + each in lines
    tensors = load_file(out / "model.safetensors").values()
    mib = sum(tensor.nbytes for tensor in tensors) / 2**20
    assert lines[-1] == f"written to {out}: {len(tensors)} tensors, {mib:.1f} MiB ({kinds})"


def test_the_command_says_what_it_saw(llama: Path, tmp_path: Path) -> None:
    outcome = run(llama, tmp_path / "out", TEXT, "--context", "32", "--kv-scales", "head")
    assert outcome.exit_code == 0, outcome.output
    assert "keys reach" in outcome.output and "(in layer" in outcome.output
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    readable = (tmp_path / "out" / "model.safetensors").stat().st_mode
    assert readable == (tmp_path / "out" / "config.json").stat().st_mode


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run(llama, tmp_path / "out", TEXT, "--device", "cuda")
    assert outcome.exit_code == 2
    assert "device=cuda: no GPU is there; choose device='cpu'" in outcome.output
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_cut_off_is_told(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".incomplete").touch()
    outcome = run(llama, tmp_path / "out", TEXT)
    assert outcome.exit_code == 2
    assert "or none yet, and holds .incomplete: a run is at work there, or" in outcome.output
