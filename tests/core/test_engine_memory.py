"""How many KV blocks an engine takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.mounting import plugins

from rackmount import Engine
from rackmount.config import EngineConfig
from rackmount.execution import worker
from rackmount.execution.memory import free_bytes, num_kv_blocks
from rackmount_registry.errors import ConfigError

TOKEN = 2 * 2 * 16 * 4 * 2
"""Bytes: keys and values of 2 heads of 16 in float32, in 2 layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")[0]


def num_blocks(folder: Path, **arguments: Any) -> int:
    engine = Engine(folder, manager=plugins(), **arguments)
    core, block_size = engine.core, engine.rack.block_size
    assert engine.rack.kv_bytes_per_token == TOKEN
    assert core.kv_bytes == core.num_kv_blocks * block_size * TOKEN
    return core.num_kv_blocks


def test_the_pool_is_as_asked_for(folder: Path) -> None:
    assert num_blocks(folder, num_kv_blocks=7) == 7
    assert num_blocks(folder, kv_cache_memory_bytes=10 * 4 * TOKEN + 1, block_size=4) == 10


def test_unasked_it_holds_every_sequence_at_full_length_and_no_more(folder: Path) -> None:
    assert num_blocks(folder, max_num_seqs=3, block_size=10) == 3 * 7
    assert num_blocks(folder, max_num_seqs=3, block_size=10, max_model_len=40) == 3 * 4


def test_weights_that_memory_does_not_hold_are_refused_before_they_are_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "free_bytes", lambda *_: 1000)
    monkeypatch.setattr(worker, "fill", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=r"the weights take .* KiB, and 1000 bytes of cpu are"):
        Engine(folder, manager=plugins())


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"max_num_batched_tokens": 2**31}, "=2147483648 must be at most 2147483647"),
        ({"max_num_seqs": 10**20}, "must be at most 2147483647"),
        ({"max_num_batched_tokens": 2**31 - 1}, "a step of 2147483647 tokens takes .* not there"),
    ],
    ids=str,
)
def test_steps_larger_than_can_be_are_refused(
    asked: dict[str, int], rule: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def some(*size: Any, **how: Any) -> torch.Tensor:
        if isinstance(size[0], int) and size[0] > 2**31:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*size, **how)

    monkeypatch.setattr(torch, "zeros", some)
    with pytest.raises(ConfigError, match=rule):
        Engine(folder, manager=plugins(), **asked)


def test_the_backend_s_preferred_block_size_is_the_default(folder: Path) -> None:
    assert num_blocks(folder, max_num_seqs=2) == 2 * 64 // 16


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"num_kv_blocks": 10**13}, "num_kv_blocks=10000000000000 take .* choose at most"),
        ({"kv_cache_memory_bytes": 10**16}, "is above the .* that are free; choose at most that"),
        ({"kv_cache_memory_bytes": TOKEN}, "one KV block takes"),
    ],
    ids=str,
)
def test_a_pool_that_cannot_be_is_refused_with_numbers(
    asked: dict[str, int], rule: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=rule):
        num_blocks(folder, **asked)


def test_it_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fill", "fill_randomly"):
        monkeypatch.delattr(f"rackmount.execution.worker.{name}")
    with pytest.raises(ConfigError, match="choose at most"):
        num_blocks(folder, num_kv_blocks=10**13)


def rack_of(device: str = "cpu", **arguments: Any) -> Any:
    """With 16 KiB a block."""
    return SimpleNamespace(
        config=EngineConfig.create(model="any", **arguments),
        device=torch.device(device),
        kv_bytes_per_token=1024,
        block_size=16,
        blocks_per_sequence=100,
        max_model_len=1600,
        num_ranks=1,
        captures_graphs=False,
    )


def test_unasked_it_takes_half_of_what_is_free_and_4_gib_at_most() -> None:
    rack = rack_of(max_num_seqs=10**6)
    assert num_kv_blocks(rack, free=64 << 20) == (32 << 20) // (16 * 1024)
    assert num_kv_blocks(rack, free=64 << 30) == (4 << 30) // (16 * 1024)
    assert num_kv_blocks(rack, free=16 * 1024) == 1
    rack.num_ranks = 4  # they share the memory
    assert num_kv_blocks(rack, free=64 << 30) == (1 << 30) // (16 * 1024)


@pytest.mark.parametrize("asked", [{}, {"num_kv_blocks": 3}, {"kv_cache_memory_bytes": 1 << 20}])
@pytest.mark.parametrize(("free", "left"), [(-5 << 30, "0 bytes"), (10_000, "9.8 KiB")])
def test_where_no_block_is_left_it_is_told_what_leaves_more(
    free: int, left: str, asked: dict[str, int]
) -> None:
    more = "less than max_num_batched_tokens=2048, max_num_seqs=9, more gpu_memory_utilization than"
    with pytest.raises(ConfigError, match=f"takes 16 KiB .* {left} are left .* {more} 0.8"):
        rack = rack_of("cuda", max_num_seqs=9, gpu_memory_utilization=0.8, **asked)
        num_kv_blocks(rack, free)
    with pytest.raises(ConfigError, match=f"{left} are left .* a machine with more memory"):
        num_kv_blocks(rack_of(**asked), free)


@pytest.mark.parametrize("place", ["SamplingTable", "Worker.room", "Worker.carve"])
def test_a_step_that_does_not_fit_into_a_gpu_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"rackmount.execution.worker.{place}", fail)
    with pytest.raises(ConfigError, match="too little memory for the largest step") as caught:
        Engine(folder, manager=plugins(), device="cpu")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_fewer_graphs_leave_more_for_the_pool() -> None:
    rack = rack_of("cuda", max_num_seqs=9)
    rack.captures_graphs = True
    with pytest.raises(
        ConfigError, match=r"max_num_seqs=9, more .* than 0.9, enforce_eager, or more ranks"
    ):
        num_kv_blocks(rack, 0)


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "memory.max": "3000\n",
        "memory.current": "2500\n",
        "memory.stat": "anon 1800\nactive_file 300\ninactive_file 400\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("rackmount.execution.memory.CGROUP", tmp_path)
    assert free_bytes(torch.device("cpu")) == 3000 - 2500 + 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(torch.device("cpu")) > 1 << 20
