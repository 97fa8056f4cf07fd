"""How long kernels take, called one after another as the engine calls them."""

import math
from collections.abc import Callable, Iterable

import torch

from rackmount_registry.formats import Weight
from rackmount_tools.ceilings import seconds

L2_TIMES = 4
"""How often what kernels read in turn fills the L2 cache."""


def seconds_of(run: Callable[[], None], device: torch.device, *, graph_safe: bool) -> float:
    """Of one call of `run`; on a GPU as a CUDA graph where that may be, so that launches cost what
    they cost in the engine."""
    if device.type != "cuda" or not graph_safe:
        return seconds(run, device, repeats=5)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, and takes the workspaces that a graph may not take
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return seconds(graph.replay, device)


def num_rotated(num_bytes: float, device: torch.device, *, least: int) -> int:
    """How many reads of so many bytes outgrow the L2 cache, `least` or more; `least` on a CPU."""
    if device.type != "cuda":
        return least
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(least, math.ceil(L2_TIMES * cache / num_bytes))


def bytes_of(weights: Iterable[Weight]) -> int:
    """Of all tensors."""
    return sum(tensor.nbytes for weight in weights for tensor in weight.tensors.values())
