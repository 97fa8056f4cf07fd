"""What the launches of all kernels share: programmatic dependent launch.

With it (compute capability 9.0 on) the next kernel of the stream starts while this one still runs.
So a kernel says that the next may come (`gdc_launch_dependents`), which then loads what no kernel
writes, its weights, and waits (`gdc_wait`) until all before it are complete before it reads or
writes anything else. Kernels take the flag `PDL`.

Products (`rackmount_registry.formats.LinearKernel`) wait before they say so, or say nothing. So
whatever starts after a product finds complete what came before the product: decoding attention
reads the step's lengths and tables, which are older than its layer's product, before it waits.

Small kernels between products wait before they say so, too. A product that came while the one
before still filled the multiprocessors would put its programs on the few that have room, and take
as long as the fullest of them: with 4-bit weights of an 8B model and 16 rows, a step of 3.9 ms
instead of 3.1 on an H200. Rotary embedding comes before attention, whose programs have equal shares
and one wave: of several tokens it says so at once.
"""

from functools import cache
from typing import Any

import torch


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on `device`: the kernel's flag, and the launcher's."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": early, "launch_pdl": early}
