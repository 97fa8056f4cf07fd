"""Operations hear how they will be called before they are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import random_ids, tiny_checkpoint
from tests.helpers.mounting import chosen_parts, draft_of, mount_draft
from torch import Tensor

from rackmount.loading.safetensors_reader import open_checkpoint
from rackmount_registry.attention import FP8, KVCache
from rackmount_registry.ops import prepare, reference_ops

TOLD = ("rms_norm", "add_rms_norm", "rotary_write", "embedding")
"""Operations whose sockets know all that a call will be like."""


class Told:
    """An operation that takes no call of a kind that it did not hear of."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.operation = operation
        self.told: set[tuple[Any, ...]] = set()
        self.calls = 0

    def prepare(self, *arguments: Any) -> None:
        assert not self.calls
        self.told.add(tuple(map(kind, arguments)))

    def __call__(self, *arguments: Any) -> Any:
        assert tuple(map(kind, arguments)) in self.told
        self.calls += 1
        return self.operation(*arguments)


def kind(argument: Any) -> Any:
    """What a kernel may be compiled for: not the number of tokens or slots, nor integers' width."""
    if not isinstance(argument, Tensor):
        return argument
    sizes = argument.shape[2 if argument.dim() == 4 else 1 :]
    return argument.is_floating_point() and argument.dtype, tuple(sizes), argument.stride(-1)


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        ("llama", None),
        ("qwen3", None),
        ("qwen3", KVCache(dtype=FP8, scale=0.5)),
    ],
    ids=["llama", "head norms", "FP8 cache"],
)
def test_sockets_tell_what_they_will_call(
    tmp_path: Path, family: str, kv_cache: KVCache | None
) -> None:
    folder, _ = tiny_checkpoint(tmp_path, family)
    checkpoint = open_checkpoint(folder)
    drafted = draft_of(checkpoint, kv_cache=kv_cache)
    parts = chosen_parts(drafted)
    told = {name: Told(getattr(reference_ops(), name)) for name in TOLD}
    parts = replace(parts, ops=SimpleNamespace(**vars(parts.ops) | told))
    reference = mount_draft(drafted, checkpoint, parts=parts)
    reference.hidden(random_ids(7), random_ids(1))
    assert all(each.calls for each in told.values())


def test_an_operation_that_compiles_nothing_is_told_nothing() -> None:
    prepare(reference_ops().silu_mul, torch.empty(1, 4), torch.empty(1, 4))
