"""What the hub is asked for, and what its refusals become. No test reaches the network."""

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from rackmount.loading.hub import fetch
from rackmount_registry.checkpoint import silent
from rackmount_registry.errors import CheckpointError

REPO = "acme/llm"
STORED = [
    "config.json",
    "quantize_config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "README.md",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "onnx/model.safetensors",
    "onnx/config.json",
    "original/params.json",
    "original/tokenizer.model",
]


class Asked(dict[str, Any]):
    """What `snapshot_download` was called with."""

    def files(self) -> list[str]:
        """Which of STORED it would fetch, by the hub's rule: fnmatch of whole paths."""
        allow, ignore = self["allow_patterns"], self["ignore_patterns"]
        return [
            name
            for name in STORED
            if any(fnmatch(name, p) for p in allow) and not any(fnmatch(name, p) for p in ignore)
        ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """The hub gives a folder."""
    asked = Asked()

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


Refusal = Callable[[Exception], str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """The text that an error of the hub's library becomes."""

    def refused(error: Exception) -> str:
        def snapshot_download(repo: str, **options: Any) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        with pytest.raises(CheckpointError) as caught:
            fetch(f"{REPO}@v2", silent)
        assert caught.value.__cause__ is error
        return str(caught.value)

    return refused


def answer(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """An error as the library raises it for an HTTP status."""
    library = errors.HTTPError.__module__.partition(".")[0]
    http = pytest.importorskip(library)
    request = http.Request("GET", f"https://huggingface.co/api/models/{REPO}")
    return kind(
        f"{status} Client Error.\n\nDetails", response=http.Response(status, request=request)
    )


def test_a_target_is_a_name_and_maybe_a_revision(asked: Asked, tmp_path: Path) -> None:
    assert fetch(REPO, silent) == tmp_path
    assert (asked["repo"], asked["revision"]) == (REPO, None)
    fetch(f"{REPO}@v2", silent)
    assert (asked["repo"], asked["revision"]) == (REPO, "v2")


def test_only_files_that_a_reader_reads_are_fetched_and_none_in_folders(asked: Asked) -> None:
    fetch(REPO, silent)
    assert asked.files() == STORED[:9]


def test_without_weights_the_configuration_alone_is_fetched(asked: Asked) -> None:
    fetch(REPO, silent, weights=False)
    assert asked.files() == ["config.json", "quantize_config.json"]


@pytest.mark.parametrize(
    "error",
    [
        errors.LocalEntryNotFoundError("no snapshot\nmore"),
        errors.OfflineModeIsEnabled("no snapshot"),
        ConnectionResetError("no snapshot"),
        errors.HTTPError("no snapshot"),
        answer(errors.HfHubHTTPError, 503),
    ],
)
def test_a_hub_that_cannot_be_reached_says_how_to_go_without(
    error: Exception, refusal: Refusal
) -> None:
    text = refusal(error)
    assert text.startswith("acme/llm is not in the local cache and the hub cannot be reached (")
    assert type(error).__name__ in text and "\n" not in text
    assert "`hf download acme/llm --local-dir DIR`" in text


def test_an_unknown_model_is_said_to_be_so(refusal: Refusal) -> None:
    text = refusal(answer(errors.RepositoryNotFoundError, 404))
    assert text.startswith("the hub knows no model 'acme/llm', or it is private")
    assert "cannot be reached" not in text


def test_a_gated_model_asks_for_its_licence_and_a_login(refusal: Refusal) -> None:
    text = refusal(answer(errors.GatedRepoError, 403))
    assert text.startswith("acme/llm is gated: accept its licence at https://huggingface.co/acme/")
    assert "`hf auth login`" in text


def test_an_unknown_revision_is_named(refusal: Refusal) -> None:
    text = refusal(answer(errors.RevisionNotFoundError, 404))
    assert text.startswith("acme/llm has no revision 'v2'")


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_may_not_read_asks_for_another(status: int, refusal: Refusal) -> None:
    text = refusal(answer(errors.HfHubHTTPError, status))
    assert text.startswith(f"the hub refuses acme/llm ({status} Client Error.); log in with")


def test_a_name_that_the_hub_cannot_have_and_a_full_disk_are_not_blamed_on_the_network(
    refusal: Refusal,
) -> None:
    text = refusal(errors.HFValidationError("no '--' in a name"))
    assert text == "'acme/llm' cannot be a name on the hub: no '--' in a name"
    text = refusal(OSError(28, "No space left on device"))
    assert text == "acme/llm cannot be fetched: [Errno 28] No space left on device"


def test_bytes_are_reported_once_and_files_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        bar = options["tqdm_class"]
        received, written = (bar(total=0, unit="B", name="hub") for _ in range(2))
        received.total = written.total = 100
        with bar(total=3, desc="Fetching 3 files") as files:
            for size in (40, 60):
                received.update(size)
                written.update(size)
                files.update(1)
            files.update()
        return "folder"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    told: list[tuple[str, int, int | None]] = []
    fetch(REPO, lambda *progress: told.append(progress))
    assert told == [("download", 40, 100), ("download", 100, 100)]


def test_the_bars_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        with options["tqdm_class"](total=1, unit="B", bar_format="{n}") as bar:
            bar.update(1)
            bar.set_description_str("done")
        return "folder"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    fetch(REPO, silent)
    assert capfd.readouterr() == ("", "")
