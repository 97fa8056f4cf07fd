"""Checkpoints: what a reader gives, whatever the file format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Report(Protocol):
    """Where long work tells how far it is: `report("download", done_bytes, total_bytes)`."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def silent(stage: str, done: int, total: int | None) -> None:
    """A `Report` that tells nobody."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A stored tensor before it is read."""

    shape: tuple[int, ...]
    """Logical shape, as the model sees it after the reader has decoded the tensor."""
    dtype: str
    """As stored: "float32", "bfloat16", "int8", ... or the format's own name, e.g. "Q4_1"."""
    file: str
    """File that holds it, for error messages."""


class Checkpoint(Protocol):
    """An opened model: configuration, tokenizer and tensors under Hugging Face names.

    Opening checks every file: one that is missing, truncated or names a tensor twice raises
    `CheckpointError` with the file and the tensor. A reader translates its dialect, so `config` and
    the tensor names look as `transformers` would save them.
    """

    config: Mapping[str, Any]
    """config.json."""
    generation_config: Mapping[str, Any]
    """generation_config.json, empty where there is none."""
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> "Tensor":
        """The tensor, or the part of it that `index` names, on the CPU; quantized storage comes
        dequantized.

        No more than the slice is read where the format allows.
        """

    def tokenizer(self, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase | None":
        """The tokenizer with its chat template; None where the checkpoint has none.

        Code that a checkpoint brings along runs only with `trust_remote_code`.
        """

    def close(self) -> None:
        """Gives files and mappings back."""
