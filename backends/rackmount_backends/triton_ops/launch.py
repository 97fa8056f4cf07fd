"""What the launches of all kernels share: programmatic dependent launch, and tile sizes.

With programmatic dependent launch (compute capability 9.0 on) the next kernel of the stream starts
while this one still runs. So a kernel says early that the next may come (`gdc_launch_dependents`),
which then loads what no kernel writes, its weights, and waits (`gdc_wait`) until all before it are
complete before it reads or writes anything else. Kernels take the flag `PDL`.

Products (`rackmount_registry.formats.LinearKernel`) wait before they say so, or say nothing. So
whatever starts after a product finds complete what came before the product: decoding attention
reads the step's lengths and tables, which are older than its layer's product, before it waits.
"""

from functools import cache
from typing import Any

import torch
import triton

VECTOR_BYTES = 16
"""Widest access of a thread."""
LANES = 32
MAX_WARPS = 16


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on `device`: the kernel's flag, and the launcher's."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": early, "launch_pdl": early}


def warps_for(num_elements: int, itemsize: int, vectors: int) -> int:
    """Warps for a tile of a power of two of elements: its threads load `vectors` vectors each, as
    far as warps go."""
    return max(1, min(MAX_WARPS, num_elements * itemsize // (VECTOR_BYTES * LANES * vectors)))


def block_of(num_columns: int, most: int = 1 << 30) -> int:
    """The least power of two that holds the columns, but not above `most`."""
    return min(most, triton.next_power_of_2(max(1, num_columns)))
