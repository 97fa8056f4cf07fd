"""What the scheduler tells the front end."""

from dataclasses import dataclass

import numpy as np

from rackmount.scheduling.request import Request


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """What a step brought: one token for each request, and which of them it ended."""

    requests: list[Request]
    token_ids: np.ndarray
    """int64 [len(requests)]."""
    finished: list[Request]


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Gauges of the moment, and counters (`total_`) since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of the blocks in use, 0 to 1; cached blocks that nobody holds are free."""
    total_preemptions: int = 0
    total_computed_tokens: int = 0
    total_sampled_tokens: int = 0
    total_prefix_queries: int = 0
    """Tokens that were looked up in the prefix cache, and found there:"""
    total_prefix_hits: int = 0
