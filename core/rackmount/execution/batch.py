"""The worker's side of scheduling: the running requests, kept from step to step and changed by
deltas."""

from dataclasses import dataclass, replace

import numpy as np

from rackmount.scheduling.plan import StepPlan
from rackmount.scheduling.ranges import spread


@dataclass(slots=True, kw_only=True)
class FlatBatch:
    """One step as the model sees it: T tokens of R requests, of which S sample. Requests lie one
    after another, those of one token first. Arrays are int32.

    They may be views of ones that the batch keeps: read them before the next step, and write to
    none. Those by token come first: in the step's buffers their places then follow from T alone.
    """

    token_ids: np.ndarray
    """[T]; -1 - row where a step in flight samples the token of that row."""
    positions: np.ndarray
    """[T]: place of each token in its sequence."""
    slots: np.ndarray
    """[T]: block id * block size + offset, where each token's KV goes."""
    query_start_loc: np.ndarray
    """[R + 1]: where each request's tokens begin, and T."""
    seq_lens: np.ndarray
    """[R], this step's tokens included."""
    rows: np.ndarray
    """[R]: the requests' rows of the tables."""
    logits_indices: np.ndarray
    """[S]: of each sampling request, the last token."""
    sample_rows: np.ndarray
    """[S]: the sampling requests' rows."""
    sample_positions: np.ndarray
    """[S]: the place that the sampled token takes in its sequence."""

    @property
    def is_decode(self) -> bool:
        """Whether every request has one token."""
        return self.token_ids.size == self.rows.size

    @property
    def num_single(self) -> int:
        """Requests of one token."""
        if self.is_decode:
            return int(self.rows.size)
        return int(np.count_nonzero(np.diff(self.query_start_loc) == 1))

    @property
    def all_sample(self) -> bool:
        return self.sample_rows.size == self.rows.size

    def padded(self, size: int, padding_row: int) -> "FlatBatch":
        """A decode step in which all sample, with requests of the padding row behind them: `size`
        requests in all."""
        assert self.is_decode and self.all_sample
        more = size - self.rows.size
        if not more:
            return self
        return FlatBatch(
            token_ids=_extended(self.token_ids, more, 0),
            positions=_extended(self.positions, more, 0),
            slots=_extended(self.slots, more, -1),
            query_start_loc=np.arange(size + 1, dtype=np.int32),
            seq_lens=_extended(self.seq_lens, more, 1),
            rows=_extended(self.rows, more, padding_row),
            logits_indices=np.arange(size, dtype=np.int32),
            sample_rows=_extended(self.sample_rows, more, padding_row),
            sample_positions=_extended(self.sample_positions, more, 0),
        )

    def with_tokens(self, size: int) -> "FlatBatch":
        """The same requests, with padding behind their tokens: `size` tokens in all."""
        more = size - self.token_ids.size
        return replace(
            self,
            token_ids=_extended(self.token_ids, more, 0),
            positions=_extended(self.positions, more, 0),
            slots=_extended(self.slots, more, -1),
        )


def padding_step(query_lens: np.ndarray, row: int) -> FlatBatch:
    """A step of nothing but padding: requests of `row` with so many tokens [R], which are all that
    there is of them, the shortest first."""
    query_lens = np.sort(query_lens)
    ends = np.cumsum(query_lens)
    starts = ends - query_lens
    rows = np.full(query_lens.size, row, np.int32)
    num_tokens = int(ends[-1])
    return FlatBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=_int32(np.arange(num_tokens) - np.repeat(starts, query_lens)),
        slots=np.full(num_tokens, -1, np.int32),
        query_start_loc=_int32(np.concatenate(([0], ends))),
        seq_lens=_int32(query_lens),
        rows=rows,
        logits_indices=_int32(ends - 1),
        sample_rows=rows,
        sample_positions=np.zeros(query_lens.size, np.int32),
    )


def _extended(values: np.ndarray, more: int, fill: int) -> np.ndarray:
    return np.concatenate((values, np.full(more, fill, np.int32)))


class PersistentBatch:
    """Applies plans in order: `apply`, `build`, and `expect` for what the step samples; `fill` once
    its tokens are on the host, which may be after the next `build`."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        num_rows = max_num_seqs + 1
        self.block_size = block_size
        self.padding_row = max_num_seqs
        """A row of no request: one token of context, in block 0."""
        self.token_ids = np.zeros((num_rows, max_model_len), np.int32)
        """Prompt and output of each row, `num_known` of them."""
        self.num_tokens = np.zeros(num_rows, np.int32)
        """Those of steps in flight included."""
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.num_computed_tokens = np.zeros(num_rows, np.int32)
        self.block_table = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        """Never gathered or copied: attention reads row `rows[r]` in place."""
        self._tenancy = np.zeros(num_rows, np.int64)
        """Admissions to each row so far."""
        self._arange = np.arange(num_rows + 1, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Takes over what the plan changes. A released row needs nothing: it is overwritten on
        admission."""
        for entry in plan.admitted:
            row, num_tokens = entry.row, entry.token_ids.size
            self.token_ids[row, :num_tokens] = entry.token_ids
            self.num_tokens[row] = self.num_known[row] = num_tokens
            self.num_prompt_tokens[row] = entry.num_prompt_tokens
            self.num_computed_tokens[row] = entry.num_computed_tokens
            self._tenancy[row] += 1
            (block_ids,) = entry.block_ids
            self.block_table[row, : block_ids.size] = block_ids
        (growth,) = plan.grown
        self.block_table[growth.rows, growth.columns] = growth.block_ids

    def build(self, plan: StepPlan) -> FlatBatch:
        """The flat batch of the plan, once: its tokens count as computed from here on."""
        rows = plan.rows.astype(np.intp)
        starts = self.num_computed_tokens[rows]
        ends = starts + plan.num_tokens
        self.num_computed_tokens[rows] = ends
        if plan.total_num_tokens == rows.size:  # one token each, as in decoding
            token_rows, positions = rows, starts
            query_start_loc = self._arange[: rows.size + 1]
        else:
            token_rows, positions = spread(rows, starts, plan.num_tokens)
            query_start_loc = np.zeros(rows.size + 1, np.int32)
            np.cumsum(plan.num_tokens, out=query_start_loc[1:])
        columns = positions // self.block_size
        blocks = self.block_table[token_rows, columns]
        known = positions < self.num_known[token_rows]
        sample_rows = rows[plan.samples]
        return FlatBatch(
            token_ids=_int32(
                np.where(known, self.token_ids[token_rows, positions], -1 - token_rows)
            ),
            positions=_int32(positions),
            slots=_int32(positions + (blocks - columns) * self.block_size),
            query_start_loc=query_start_loc,
            seq_lens=_int32(ends),
            rows=plan.rows,
            logits_indices=query_start_loc[1:][plan.samples] - 1,
            sample_rows=_int32(sample_rows),
            sample_positions=self.num_tokens[sample_rows],
        )

    def expect(self, rows: np.ndarray) -> np.ndarray:
        """Each of `rows` gets a token that is not known yet. Returns what `fill` needs to know
        it again."""
        self.num_tokens[rows] += 1
        tenancy: np.ndarray = self._tenancy[rows]
        return tenancy

    def fill(
        self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, tenancy: np.ndarray
    ) -> None:
        """The tokens that a step sampled. A row that has another request by now is left alone."""
        still = self._tenancy[rows] == tenancy
        rows, positions = rows[still], positions[still]
        self.token_ids[rows, positions] = token_ids[still]
        self.num_known[rows] = positions + 1


def _int32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32, copy=False)
