"""Operations and kernels hear how they will be called before they are."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import random_ids, tiny_checkpoint
from tests.helpers.mounting import chosen_parts, draft_of, mount_draft
from tests.helpers.ranks import ThreadGroup
from torch import Tensor

from rackmount.loading.safetensors_reader import open_checkpoint
from rackmount_backends.torch_linear import DenseLinear
from rackmount_registry.attention import FP8, KVCache
from rackmount_registry.axes import Mesh
from rackmount_registry.formats import Weight
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


class Careful(DenseLinear):
    """A kernel that makes no product of a kind that it did not hear of."""

    def __init__(self) -> None:
        self.told: list[tuple[torch.dtype, bool]] = []

    def prepare(
        self,
        weight: Weight,
        uses: Collection[str] = (),
        dtype: torch.dtype | None = None,
        bias: bool = False,
    ) -> Any:
        assert dtype is not None
        self.told.append((dtype, bias))
        return super().prepare(weight, uses), (dtype, bias)

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None) -> Tensor:
        weight, told = prepared
        assert told == (x.dtype, bias is not None)
        return super().run(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_kernels_hear_of_the_dtype_and_of_a_bias(tmp_path: Path, dtype: torch.dtype) -> None:
    """A bias behind a sum over ranks is the first one's."""
    folder, _ = tiny_checkpoint(tmp_path, "llama", attention_bias=True)
    group = ThreadGroup(2)
    ranks, kernels = [], [Careful(), Careful()]
    for member, kernel in zip(group.members, kernels, strict=True):
        checkpoint = open_checkpoint(folder)
        drafted = draft_of(checkpoint, dtype=dtype, mesh=Mesh.tensor_parallel(member))
        parts = chosen_parts(drafted)
        ((_, descriptor),) = parts.kernels.values()
        parts = replace(parts, kernels={"dense": (kernel, replace(descriptor, epilogues=()))})
        ranks.append(mount_draft(drafted, checkpoint, parts=parts))
    group.run(lambda rank: ranks[rank].logits(random_ids(7)))
    layer = [True, True, False, False], [True, False, False, False]  # qkv, o, gate_up, down
    for kernel, biases in zip(kernels, layer, strict=True):
        assert kernel.told == [(dtype, bias) for bias in (*biases, *biases, False)]
