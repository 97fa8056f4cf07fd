"""What a GPU needs beside weights and KV: measured, by a real step and a trial capture."""

from dataclasses import dataclass

import numpy as np
import torch

from rackmount.execution.batch import FlatBatch
from rackmount.execution.graphs import DecodeGraphs, Sample, sizes
from rackmount.execution.runner import Runner


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Bytes on the device."""

    activations: int
    """Of the largest step: token budget and number of requests at their limits."""
    graphs: int


def profile(runner: Runner, sample: Sample, padding_row: int) -> Profile:
    """Runs the largest step and captures two graphs, over a pool of one block that nothing is
    written to."""
    runner.carve(1)
    config = runner.rack.config
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for _ in range(2):  # the first one also compiles and takes workspaces
        tensors, hidden = runner.hidden(largest_step(runner))
        sample(runner.logits(hidden.index_select(0, tensors.logits_indices)), tensors)
        del tensors, hidden
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_reserved() - before
    graphs = 0
    if runner.rack.captures_graphs:
        all_sizes = sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
        trial = DecodeGraphs(runner, sample, padding_row)
        first, other = (_taken(trial, [size]) for size in (all_sizes[-1], all_sizes[0]))
        graphs = first + other * (len(all_sizes) - 1)
        del trial
    torch.cuda.empty_cache()
    return Profile(activations=activations, graphs=graphs)


def _taken(graphs: DecodeGraphs, batch_sizes: list[int]) -> int:
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    graphs.capture(batch_sizes)
    torch.cuda.empty_cache()
    return max(0, before - torch.cuda.mem_get_info()[0])


def largest_step(runner: Runner) -> FlatBatch:
    """As many requests and tokens as a step may have; all of them read block 0."""
    rack = runner.rack
    num_tokens = rack.config.max_num_batched_tokens
    num_requests = min(rack.config.max_num_seqs, num_tokens)
    num_tokens = min(num_tokens, num_requests * rack.max_model_len)
    ends = np.arange(1, num_requests + 1) * num_tokens // num_requests
    starts = np.concatenate(([0], ends[:-1]))
    positions = np.arange(num_tokens) - np.repeat(starts, ends - starts)
    zeros = np.zeros(num_requests, np.int32)
    return FlatBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions.astype(np.int32),
        slots=np.full(num_tokens, -1, np.int32),
        query_start_loc=np.concatenate(([0], ends)).astype(np.int32),
        seq_lens=(ends - starts).astype(np.int32),
        rows=zeros,
        logits_indices=(ends - 1).astype(np.int32),
        sample_rows=zeros,
        sample_positions=zeros,
    )
