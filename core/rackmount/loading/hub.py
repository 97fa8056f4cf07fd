"""Fetching from the Hugging Face hub."""

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: its HTTP library's
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types

from rackmount.loading.safetensors_reader import QUANTIZATION_FILES
from rackmount_registry.checkpoint import Report
from rackmount_registry.errors import CheckpointError

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
CONFIG_FILES = ("config.json", *QUANTIZATION_FILES)
NOT_READ = ("*/*", "consolidated*")
"""Exports in folders (onnx/, original/), and the weights once more as their author saved them."""


def fetch(target: str, report: Report, *, weights: bool = True) -> Path:
    """Downloads `owner/name` or `owner/name@revision` into the hub's own cache, or finds it there;
    without `weights` only its configuration.

    Raises:
        CheckpointError: the hub does not know or not give it, or cannot be reached and the cache
            lacks it.
    """
    repo, _, revision = target.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=list(FILES if weights else CONFIG_FILES),
            ignore_patterns=list(NOT_READ),
            tqdm_class=_progress(report),
        )
    except (HTTPError, OSError, HFValidationError) as error:
        raise CheckpointError(_failure(error, repo, revision)) from error
    return Path(folder)


def _failure(error: Exception, repo: str, revision: str) -> str:
    """What went wrong, and what to do about it."""
    first_line = str(error).strip().split("\n")[0]
    match error:
        case HFValidationError():
            return f"{repo!r} cannot be a name on the hub: {first_line}"
        case GatedRepoError():
            return (
                f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, then log "
                "in with `hf auth login`"
            )
        case RepositoryNotFoundError():
            return (
                f"the hub knows no model {repo!r}, or it is private; check the name, or log in "
                "with `hf auth login`"
            )
        case RevisionNotFoundError():
            return (
                f"{repo} has no revision {revision!r}; its branches and tags are at "
                f"https://huggingface.co/{repo}/tree/main"
            )
        case HfHubHTTPError(response=response) if response.status_code in (401, 403):
            return (
                f"the hub refuses {repo} ({first_line}); log in with `hf auth login`, by a token "
                "that may read it"
            )
        case HTTPError() | LocalEntryNotFoundError() | ConnectionError() | TimeoutError():
            return (
                f"{repo} is not in the local cache and the hub cannot be reached "
                f"({type(error).__name__}: {first_line}); on a machine with access run "
                f"`hf download {repo} --local-dir DIR`, bring DIR here and pass its path as the "
                "model"
            )
    return f"{repo} cannot be fetched: {first_line}"


def _progress(report: Report) -> type:
    """A progress bar class for the hub's library that reports instead of printing."""
    done = 0

    class Reporting(tqdm):  # type: ignore[misc]  # for the same reason
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **(kwargs | {"disable": True}))
            self.counts_bytes = kwargs.get("unit") == "B"
            self.num_bytes = 0

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done
            self.num_bytes += int(n or 0)
            # Several bars count the same bytes, as received and as written; others count files.
            if self.counts_bytes and self.total and self.num_bytes > done:
                done = self.num_bytes
                report("download", done, int(self.total))
            return None

    return Reporting
