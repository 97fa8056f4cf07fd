"""What a GPU needs beside weights and KV: measured, by a real step and a trial capture."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from rackmount.execution.batch import padding_step
from rackmount.execution.graphs import DecodeGraphs, MixedGraphs, Sample
from rackmount.execution.runner import Runner


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Bytes on the device."""

    activations: int
    """Of the largest step: token budget and number of requests at their limits."""
    graphs: int


def profile(runner: Runner, sample: Sample, padding_row: int) -> Profile:
    """Runs the largest step and captures some graphs, over a pool of one block that nothing is
    written to."""
    runner.carve(1)
    rack = runner.rack
    num_requests = min(rack.config.max_num_seqs, rack.config.max_num_batched_tokens)
    num_tokens = min(rack.config.max_num_batched_tokens, num_requests * rack.max_model_len)
    flat = padding_step(num_tokens, num_requests, padding_row)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for _ in range(2):  # the first one also compiles and takes workspaces
        tensors, hidden = runner.hidden(flat)
        sample(runner.logits(hidden.index_select(0, tensors.logits_indices)), tensors)
        del tensors, hidden
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_reserved() - before
    graphs = 0
    if rack.captures_graphs:
        decode, mixed = DecodeGraphs(runner, sample, padding_row), MixedGraphs(runner)
        sizes = rack.decode_sizes
        first, other = (_taken(decode.capture, [size]) for size in (sizes[-1], sizes[0]))
        graphs = first + other * (len(sizes) - 1) + _taken(mixed.capture, rack.mixed_sizes)
        del decode, mixed
    torch.cuda.empty_cache()
    return Profile(activations=activations, graphs=graphs)


def _taken(capture: Callable[[Iterable[int]], None], sizes: list[int]) -> int:
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    capture(sizes)
    torch.cuda.empty_cache()
    return max(0, before - torch.cuda.mem_get_info()[0])
