"""Running requests as a struct of arrays, so that a step's work is a handful of numpy calls.

A row is a slot of the persistent batch, on both sides. Index arrays are np.intp: numpy gathers
several times faster by its own index type.
"""

import numpy as np

from rackmount.scheduling.request import Request

NEVER = np.iinfo(np.int64).max


class RequestTable:
    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        num_blocks = -(-max_model_len // block_size)
        self.token_blocks = np.zeros((max_num_seqs, num_blocks, block_size), "<i4")
        self.token_ids = self.token_blocks.reshape(max_num_seqs, -1)
        """Prompt and output, `num_tokens` of them; `token_blocks` is the same by block."""
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        """Known tokens and those that a step in flight will sample."""
        self.num_admitted = np.zeros(max_num_seqs, np.int64)
        """Those that it began with."""
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        """Tokens that have their KV once the steps in flight are done."""
        self.max_computed = np.zeros(max_num_seqs, np.int64)
        """The final length less one: the last token is never computed."""
        self.capacity = np.zeros(max_num_seqs, np.int64)
        """Tokens that the row's blocks hold."""
        self.publish_at = np.zeros(max_num_seqs, np.int64)
        """Computed tokens at which the next block is full."""
        self.live = np.zeros(max_num_seqs, np.bool_)
        """False for a row whose request has left, though a step in flight may still use it."""
        self.requests = np.empty(max_num_seqs, np.object_)
        self.free_rows = list(reversed(range(max_num_seqs)))

    def occupy(self, request: Request, token_ids: np.ndarray) -> int:
        """Puts a request with its tokens into a free row. The caller sets the other columns."""
        row = self.free_rows.pop()
        self.token_ids[row, : token_ids.size] = token_ids
        self.num_tokens[row] = self.num_admitted[row] = token_ids.size
        self.live[row] = True
        self.requests[row] = request
        return row

    def prefills(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows have tokens to compute that they began with."""
        still: np.ndarray = self.num_computed[rows] < self.num_admitted[rows]
        return still

    def vacate(self, row: int) -> None:
        self.requests[row] = None
        self.free_rows.append(row)
