"""Tiny models for the benchmarks, and their commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.mounting import plugins
from typer.testing import CliRunner

from rackmount.cli.app import build_app
from rackmount_registry.plugins import PluginManager

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a model with a dense layer and one of experts."""
    file = tmp_path_factory.mktemp("tiny") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.fixture
def record_of(tmp_path: Path, tiny: Path) -> Callable[..., dict[str, Any]]:
    """Runs `rackmount bench ...` with the tiny model and gives what it wrote; `more` is mounted
    beside what is installed."""

    def run(arguments: str, more: PluginManager | None = None) -> dict[str, Any]:
        manager = plugins() + more if more else plugins()
        file = tmp_path / "record.json"
        name, *rest = arguments.split()
        asked = ["bench", name, str(tiny), *rest, "--json", str(file)]
        asked += ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
        outcome = CliRunner().invoke(build_app(manager), asked, catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return json.loads(file.read_text())

    return run


@pytest.fixture
def refusal_of(tiny: Path) -> Callable[..., str]:
    """Runs a command that is refused, and gives the text of its error; `{model}` in the arguments
    is the tiny model."""

    def run(arguments: str) -> str:
        asked = [word.replace("{model}", str(tiny)) for word in arguments.split()]
        outcome = CliRunner().invoke(build_app(plugins()), asked, catch_exceptions=False)
        assert outcome.exit_code == 2, outcome.output
        return outcome.stderr

    return run
