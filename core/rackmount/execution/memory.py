"""How much memory there is, and how many KV blocks it holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships no types
import torch

from rackmount.rack import Rack
from rackmount_registry.errors import ConfigError

CPU_KV_BYTES = 4 << 30
"""Most that the KV pool takes of a CPU's memory unasked."""
CPU_SHARE = 0.5
"""Of a CPU's free memory, for the KV pool; the rest is for activations and others."""
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
CGROUP = Path("/sys/fs/cgroup")
"""Where a container's own limit stands, under Linux's cgroup v2."""


def size(num_bytes: float) -> str:
    """Bytes for people, in binary units with one digit after the point, if any."""
    exponent = 0
    while num_bytes >= 1024 and exponent + 1 < len(UNITS):
        num_bytes, exponent = num_bytes / 1024, exponent + 1
    return f"{num_bytes:.1f}".removesuffix(".0") + f" {UNITS[exponent]}"


def free_bytes(device: torch.device, utilization: float = 1.0) -> int | None:
    """Memory of the device that can still be taken, of a GPU as long as no more than the share
    `utilization` of it is in use; None where there is no such device here."""
    if device.type == "cpu":
        return min(int(psutil.virtual_memory().available), _left_to_container())
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1 - utilization))


def _left_to_container() -> int:
    """What the container's limit leaves; endless without one. The page cache counts as free."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stats = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    cached = sum(int(stats.get(name, 0)) for name in ("active_file", "inactive_file"))
    return 1 << 62 if limit == "max" else int(limit) - used + cached


def require_weights(rack: Rack, free: int, ranks: int = 1) -> None:
    """The weights of so many ranks fit into what is free: to load more than there is of a host's
    memory, its system would end this process without a word.

    Raises:
        ConfigError: they do not.
    """
    weights = rack.draft.weight_bytes * ranks
    if weights > free:
        share = rack.config.gpu_memory_utilization
        more = "or a machine with more memory"
        if rack.device.type == "cuda":
            more = "more ranks, or a device with more memory"
            more += f", or more gpu_memory_utilization than {share}" * (share < 1)
        raise ConfigError(
            f"the weights take {size(weights)}, and {size(max(free, 0))} of {rack.device} are "
            f"there; choose fewer bits a weight, {more}"
        )


def num_kv_blocks(rack: Rack, free: int) -> int:
    """Blocks of a rank's KV pool, with everything else already in memory: as asked for, or what
    fits and can be used.

    Raises:
        ConfigError: not one block fits, or not as many as asked for; on a GPU, not one request of
            full length.
    """
    config = rack.config
    bytes_per_block = rack.kv_bytes_per_token * rack.block_size
    block = f"one KV block takes {size(bytes_per_block)} ({rack.block_size} tokens of "
    block += f"{rack.kv_bytes_per_token} bytes)"
    if free < bytes_per_block:
        raise ConfigError(f"{block}, and {size(max(free, 0))} are left for the pool; {_more(rack)}")
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * bytes_per_block > free:
            raise ConfigError(
                f"num_kv_blocks={config.num_kv_blocks} take {bytes_per_block} bytes each, and "
                f"{free} are free; choose at most {free // bytes_per_block}"
            )
        _require_length(rack, config.num_kv_blocks, "num_kv_blocks")
        return config.num_kv_blocks
    budget, source = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if budget is None:
        budget, source = max(bytes_per_block, _unasked(rack, free)), "gpu_memory_utilization"
    elif budget > free:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget} is above the {free} that are free; choose at most that"
        )
    fitting = budget // bytes_per_block
    if fitting < 1:
        raise ConfigError(
            f"{block}, more than kv_cache_memory_bytes={budget}; choose at least "
            f"{bytes_per_block}, or a smaller block_size"
        )
    _require_length(rack, fitting, source)
    return min(fitting, config.max_num_seqs * rack.blocks_per_sequence)


@contextmanager
def room_needed(rack: Rack) -> Iterator[None]:
    """Around what takes a GPU's memory that was not counted yet.

    Raises:
        ConfigError: there is not as much.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"{rack.device} has too little memory for the largest step beside the weights"
        raise ConfigError(f"{what}; {_more(rack)}") from error


def _more(rack: Rack) -> str:
    """What leaves more memory for the pool."""
    config = rack.config
    if rack.device.type != "cuda":
        return "choose a smaller model, or a machine with more memory"
    given = f"max_num_batched_tokens={config.max_num_batched_tokens}, "
    given += f"max_num_seqs={config.max_num_seqs}"
    share = config.gpu_memory_utilization
    more = f", more gpu_memory_utilization than {share}" * (share < 1)
    more += ", enforce_eager" * rack.captures_graphs
    return f"choose less than {given}{more}, or more ranks"


def _require_length(rack: Rack, num_blocks: int, source: str) -> None:
    """On a GPU a request of full length must fit; on a CPU the pool is a part of what there is."""
    if rack.device.type == "cuda" and num_blocks < rack.blocks_per_sequence:
        raise ConfigError(
            f"one request of max_model_len={rack.max_model_len} takes {rack.blocks_per_sequence} "
            f"blocks of KV, and {num_blocks} are there; choose max_model_len of at most "
            f"{num_blocks * rack.block_size}, or more {source} than "
            f"{getattr(rack.config, source)}"
        )


def _unasked(rack: Rack, free: int) -> int:
    """What the pool takes where nobody said how much."""
    if rack.device.type == "cuda":
        return free
    # Ranks share the memory of the host.
    return min(int(free * CPU_SHARE), CPU_KV_BYTES) // rack.num_ranks
