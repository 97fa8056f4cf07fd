"""`rackmount serve`: flags, the file of flags, and what becomes of them. No engine is started."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rackmount.cli.app import build_app
from rackmount.config import EngineConfig
from rackmount.serving.async_engine import AsyncEngine
from rackmount_registry.plugins import PluginManager
from rackmount_server import process
from rackmount_server.settings import ServerSettings


class Started(Exception):  # noqa: N818  # how these tests end
    """With the arguments of an engine that would have started."""


def serve(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The result, the settings, and the engine's configuration, where it came so far."""
    seen: dict[str, Any] = {}

    def run(settings: ServerSettings, start: Any, ready: Any) -> int:
        seen["settings"] = settings
        with pytest.raises(Started):
            start().send(None)
        return 0

    async def start(model: str, **given: Any) -> None:
        del given["manager"], given["report"]
        seen["engine"] = EngineConfig.create(model=model, **given)
        raise Started

    monkeypatch.setattr(process, "serve", run)
    monkeypatch.setattr(AsyncEngine, "start", start)
    app = build_app(PluginManager.discover())
    result = CliRunner().invoke(app, ["serve", *arguments])
    return result, seen.get("settings"), seen.get("engine")


def test_flags_that_people_type_by_habit_work(monkeypatch: pytest.MonkeyPatch) -> None:
    result, settings, engine = serve(
        monkeypatch,
        *("some/model", "--tensor-parallel-size", "2", "--max-model-len", "512"),
        *("--gpu-memory-utilization", "0.5", "--max-num-seqs", "7"),
        *("--max-num-batched-tokens", "99", "--enforce-eager", "--kv-cache-dtype", "auto"),
        *("--quantization", "fp8", "--served-model-name", "a", "--served-model-name", "b"),
        *("--no-enable-prefix-caching", "--seed", "3", "--attention-backend", "torch"),
    )
    assert result.exit_code == 0, result.output
    assert settings.model_names == ("a", "b")
    assert engine == EngineConfig.create(
        model="some/model",
        tp=2,
        max_model_len=512,
        gpu_memory_utilization=0.5,
        max_num_seqs=7,
        max_num_batched_tokens=99,
        enforce_eager=True,
        quantization="fp8",
        enable_prefix_caching=False,
        seed=3,
        backend="torch",
    )


def test_a_file_holds_any_flag_and_the_command_line_goes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: some/model\n"
        "tensor-parallel-size: 2\n"
        "max_num_seqs: 7\n"
        "no-enable-prefix-caching: true\n"
        "enforce-eager: true\n"
        "served-model-name: [a, b]\n"
        "port: 9000\n"
    )
    result, settings, engine = serve(monkeypatch, "--config", str(file), "--port", "0")
    assert result.exit_code == 0, result.output
    assert (settings.port, settings.model_names) == (0, ("a", "b"))
    assert (engine.model, engine.tp, engine.max_num_seqs) == ("some/model", 2, 7)
    assert (engine.enable_prefix_caching, engine.enforce_eager) == (False, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-seq: 7", "max-num-seqs"),
        ("config: x", "no option"),
        ("- a", "name: value"),
        ("a: [", "cannot be read"),
        ("tp: 2\ntensor-parallel-size: 2", "two names"),
        ("no-enable-prefix-caching: 5", "true or false"),
        ("max-num-seqs: many", "--max-num-seqs"),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    result, settings, _ = serve(monkeypatch, "m", "--config", str(file))
    assert (result.exit_code, settings) == (2, None)
    assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key-file", "/nowhere"], "cannot be read"),
        (["--api-key-file", "/dev/null"], "holds no key"),
        (["--chat-template", "/nowhere"], "cannot be read"),
        (["--config", "/nowhere"], "cannot be read"),
        (["--port", "70000"], "65535"),
    ],
)
def test_a_flag_that_is_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    result, settings, _ = serve(monkeypatch, "m", *arguments)
    assert (result.exit_code, settings) == (2, None)
    assert words in result.output


def test_keys_are_lines_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecret \n\nother\n")
    _, settings, _ = serve(monkeypatch, "m", "--api-key-file", str(file))
    assert settings.api_keys == ("secret", "other")


@pytest.mark.parametrize(
    ("host", "warned"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)],
)
def test_an_open_address_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, host: str, warned: bool
) -> None:
    result, settings, _ = serve(monkeypatch, "m", "--host", host)
    assert settings.host == host
    assert ("warning" in result.output) == warned


def test_the_default_is_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings, _ = serve(monkeypatch, "m")
    assert (settings.host, settings.is_local, settings.port) == ("127.0.0.1", True, 8000)
