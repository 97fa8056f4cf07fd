"""Fetching from the Hugging Face hub."""

from pathlib import Path
from typing import Any

from rackmount_registry.checkpoint import Report
from rackmount_registry.errors import CheckpointError

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
CONFIG_FILES = ("config.json",)


def fetch(target: str, report: Report, *, weights: bool = True) -> Path:
    """Downloads `owner/name` or `owner/name@revision` into the hub's own cache, or finds it there;
    without `weights` only its config.json.

    Raises:
        CheckpointError: the hub does not know it, or cannot be reached and the cache lacks it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo, _, revision = target.partition("@")
    try:
        folder = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=list(FILES if weights else CONFIG_FILES),
            tqdm_class=_progress(report),
        )
    except (LocalEntryNotFoundError, ConnectionError, OSError) as error:
        raise CheckpointError(
            f"{repo} is not in the local cache and the hub cannot be reached or refuses it "
            f"({type(error).__name__}: {_first_line(error)}); on a machine with access run "
            f"`hf download {repo} --local-dir DIR`, bring DIR here and pass its path as the model"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"the hub refuses {repo}: {_first_line(error)}") from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _progress(report: Report) -> type:
    """A progress bar class for the hub's library that reports instead of printing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types

    class Reporting(tqdm):  # type: ignore[misc]  # for the same reason
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **(kwargs | {"disable": True}))
            self.done = 0

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            if self.total:
                report("download", self.done, int(self.total))
            return None

    return Reporting
