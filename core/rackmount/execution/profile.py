"""What a GPU needs beside weights and KV: measured, by a real step and a trial capture."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from rackmount.execution.batch import FlatBatch, padding_step
from rackmount.execution.graphs import DecodeGraphs, MixedGraphs
from rackmount.execution.runner import Runner
from rackmount.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Bytes on the device."""

    activations: int
    """Of the largest step: token budget and number of requests at their limits."""
    graphs: int


def profile(runner: Runner, sampler: Sampler, padding_row: int, prompt_chunk: int) -> Profile:
    """Runs the largest steps and captures some graphs, over a pool of one block that nothing is
    written to. `prompt_chunk` is how many tokens of a prompt have their logprobs taken at once."""
    runner.carve(1)
    rack = runner.rack
    num_requests = min(rack.config.max_num_seqs, rack.config.max_num_batched_tokens)
    num_tokens = min(rack.config.max_num_batched_tokens, num_requests * rack.max_model_len)
    prompts = np.diff(np.arange(num_requests + 1) * num_tokens // num_requests)
    mixed_lens = np.ones(num_requests, int)
    mixed_lens[0] += min(num_tokens - num_requests, rack.max_model_len - 1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for query_lens in (prompts, mixed_lens, prompts):  # the first time compiles
        _run(runner, sampler, padding_step(query_lens, padding_row), prompt_chunk)
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_reserved() - before
    decode, mixed = DecodeGraphs(runner, sampler, padding_row), MixedGraphs(runner, padding_row)
    graphs = _graphs(decode.capture, rack.decode_sizes) + _graphs(mixed.capture, rack.mixed_sizes)
    del decode, mixed
    gc.collect()  # what garbage holds would not be there for KV
    torch.cuda.empty_cache()
    return Profile(activations=activations, graphs=graphs)


def _run(runner: Runner, sampler: Sampler, flat: FlatBatch, prompt_chunk: int) -> None:
    """A step whose requests all ask for everything, logprobs of their prompts too."""
    tensors, hidden = runner.hidden(flat, of_all=True)
    some = tensors.token_ids[:prompt_chunk]
    runner.ops.logprobs(runner.logits(hidden[: len(some)]), some.long(), 1)
    logits = runner.logits(hidden.index_select(0, tensors.logits_indices))
    del hidden
    runner.sample(tensors, logits.clone(), sampler.draw)
    token_ids = runner.sample(tensors, logits, sampler.draw_processed)
    runner.ops.logprobs(logits, token_ids.clamp(min=0).long(), 1)


def _graphs(capture: Callable[[Iterable[int]], None], sizes: list[int]) -> int:
    """Bytes of graphs of all sizes: the largest takes the room that others share, and of others
    none takes more than the second largest."""
    return _taken(capture, sizes[-1:]) + _taken(capture, sizes[-2:-1]) * (len(sizes) - 1)


def _taken(capture: Callable[[Iterable[int]], None], sizes: list[int]) -> int:
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    capture(sizes)
    torch.cuda.empty_cache()
    return max(0, before - torch.cuda.mem_get_info()[0])
