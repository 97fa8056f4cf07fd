"""The worker's side of scheduling: the running requests, kept from step to step and changed by
deltas."""

from dataclasses import dataclass

import numpy as np

from rackmount.scheduling.plan import StepPlan
from rackmount.scheduling.ranges import spread


@dataclass(slots=True, kw_only=True)
class FlatBatch:
    """One step as the model sees it: T tokens of R requests, one request after another.

    The arrays may be views of ones that the batch keeps: read them before the next step, and write
    to none.
    """

    token_ids: np.ndarray
    """int64 [T]."""
    positions: np.ndarray
    """int64 [T]: place of each token in its sequence."""
    query_start_loc: np.ndarray
    """int32 [R + 1]: where each request's tokens begin, and T."""
    seq_lens: np.ndarray
    """int32 [R], this step's tokens included."""
    rows: np.ndarray
    """int32 [R]: the requests' rows of the block tables."""
    slot_mapping: list[np.ndarray]
    """int64 [T] per KV group: block id * block size + offset, where each token's KV goes."""
    logits_indices: np.ndarray
    """int64 [S]: of each sampling request, the last token."""
    sample_rows: np.ndarray
    """int64 [S]: the sampling requests' rows."""


class PersistentBatch:
    """Applies plans in order: `apply`, `build`, and `append` once the step has sampled."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_kv_groups: int = 1
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        """Prompt and output of each row, `num_tokens` of them."""
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.block_tables = [
            np.zeros((max_num_seqs, max_blocks), np.int32) for _ in range(num_kv_groups)
        ]
        """Per KV group. Never gathered or copied: attention reads row `rows[r]` in place."""
        self._arange = np.arange(max_num_seqs + 1, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Takes over what the plan changes. A released row needs nothing: it is overwritten on
        admission."""
        for entry in plan.admitted:
            row, num_tokens = entry.row, entry.token_ids.size
            self.token_ids[row, :num_tokens] = entry.token_ids
            self.num_tokens[row] = num_tokens
            self.num_prompt_tokens[row] = entry.num_prompt_tokens
            self.num_computed_tokens[row] = entry.num_computed_tokens
            for table, block_ids in zip(self.block_tables, entry.block_ids, strict=True):
                table[row, : block_ids.size] = block_ids
        for table, growth in zip(self.block_tables, plan.grown, strict=True):
            table[growth.rows, growth.columns] = growth.block_ids

    def build(self, plan: StepPlan) -> FlatBatch:
        """The flat batch of the plan, once: its tokens count as computed from here on."""
        rows = plan.rows.astype(np.intp)
        starts = self.num_computed_tokens[rows]
        ends = starts + plan.num_tokens
        self.num_computed_tokens[rows] = ends
        if plan.total_num_tokens == rows.size:  # one token each, as in decoding
            token_rows, positions = rows, starts
            query_start_loc = self._arange[: rows.size + 1]
            logits_indices = plan.samples.nonzero()[0]
        else:
            token_rows, positions = spread(rows, starts, plan.num_tokens)
            query_start_loc = np.zeros(rows.size + 1, np.int32)
            np.cumsum(plan.num_tokens, out=query_start_loc[1:])
            logits_indices = query_start_loc[1:][plan.samples].astype(np.int64) - 1
        columns = positions // self.block_size
        return FlatBatch(
            token_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            rows=plan.rows,
            slot_mapping=[
                positions + (table[token_rows, columns] - columns) * self.block_size
                for table in self.block_tables
            ],
            logits_indices=logits_indices,
            sample_rows=rows[plan.samples],
        )

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each of `rows`."""
        positions = self.num_tokens[rows]
        self.token_ids[rows, positions] = token_ids
        self.num_tokens[rows] = positions + 1
