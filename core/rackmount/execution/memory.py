"""How much memory there is, and how many KV blocks it holds."""

import os

import torch

from rackmount.rack import Rack
from rackmount_registry.errors import ConfigError

CPU_KV_BYTES = 4 << 30
"""Most that the KV pool takes of a CPU's memory unasked."""
SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Of the free memory, for the KV pool; the rest is for activations and others."""


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where there is no such device here."""
    if device.type == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info(device)[0]


def num_kv_blocks(rack: Rack, free: int) -> int:
    """Blocks of a rank's KV pool, with the weights already in memory: as asked for, or what fits
    and can be used.

    Raises:
        ConfigError: not one block fits.
    """
    config = rack.config
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    bytes_per_block = rack.kv_bytes_per_token * rack.block_size
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = int(free * SHARE[rack.device.type])
        if rack.device.type == "cpu":
            budget = min(budget, CPU_KV_BYTES) // rack.num_ranks  # which share the memory
    fitting = budget // bytes_per_block
    if fitting < 1:
        raise ConfigError(
            f"one KV block takes {bytes_per_block} bytes ({rack.block_size} tokens of "
            f"{rack.kv_bytes_per_token}), and {budget} are there for the pool; give "
            f"kv_cache_memory_bytes of at least {bytes_per_block}, or a smaller block_size"
        )
    return min(fitting, config.max_num_seqs * rack.blocks_per_sequence)
