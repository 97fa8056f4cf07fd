"""What the scheduler tells the worker about a step: only what changed since the last one.

Array fields have the type and shape of their docstrings: R rows compute T tokens, and G blocks are
appended.
"""

import msgspec
import numpy as np

from rackmount.sampling.request import SamplingRequest


class RowAdmission(msgspec.Struct, array_like=True, gc=False):
    """A request enters a row. Everything that the worker must know about it."""

    row: int
    request_id: str
    token_ids: np.ndarray
    """int32: the prompt, and the outputs that it had before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the blocks already."""
    block_ids: list[np.ndarray]
    """int32, per KV group."""
    sampling: SamplingRequest | None


class Growth(msgspec.Struct, array_like=True, gc=False):
    """Blocks appended to rows of one KV group: `block_table[rows, columns] = block_ids`."""

    rows: np.ndarray
    """int32 [G]."""
    columns: np.ndarray
    """int32 [G]."""
    block_ids: np.ndarray
    """int32 [G]."""


class StepPlan(msgspec.Struct, array_like=True, gc=False, tag=True):
    """One step. Released rows come first, then admitted ones (a row may be both), then growth."""

    released: list[int]
    admitted: list[RowAdmission]
    grown: list[Growth]
    """Per KV group."""
    rows: np.ndarray
    """int32 [R]: the rows that compute, in the order of the flat batch: those of one token first,
    since attention may serve these by another backend."""
    num_tokens: np.ndarray
    """int32 [R], each at least 1: tokens that the row computes."""
    samples: np.ndarray
    """bool [R]: the row reaches its last token, so a new one is sampled."""
    total_num_tokens: int
    """T, the sum of `num_tokens`."""
