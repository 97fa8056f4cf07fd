"""Which tokens may be drawn, the first of the logit processors.

What allowed ids, grammar, bad words and early stop ids leave is one bitmask a row, which the host
composes.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.bitmask import ban, num_words
from rackmount.sampling.grammars import RowGrammar
from rackmount.sampling.processor import LogitProcessor
from rackmount_registry.ops import Ops


class RowMask:
    """What one row may draw at each position.

    Args:
        allowed: None for all ids.
        bad_words: the tokens of each, none of them empty.
        early: what is banned below `min_position`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Iterable[int] | None,
        grammar: RowGrammar | None,
        bad_words: Sequence[Sequence[int]],
        early: Iterable[int],
        min_position: int,
    ) -> None:
        self._late = np.full(num_words(vocab_size), -1, np.int32)
        if allowed is not None:
            ban(self._late, allowed)
            np.invert(self._late, out=self._late)
        ban(self._late, (word[0] for word in bad_words if len(word) == 1))
        self._early = self._late.copy()
        ban(self._early, early)
        self._min_position = min_position
        self._grammar = grammar
        self._bad_words = [word for word in bad_words if len(word) > 1]

    @property
    def reads_history(self) -> bool:
        """Whether it matters which tokens come before the position."""
        return self._grammar is not None or bool(self._bad_words)

    def at(self, history: np.ndarray) -> np.ndarray:
        """The bitmask for the token behind these: the same array where nothing has changed."""
        mask = self._late if len(history) >= self._min_position else self._early
        if not self.reads_history:
            return mask
        mask = mask.copy()
        if self._grammar is not None:
            of_grammar = np.empty_like(mask)
            self._grammar.fill_bitmask(history, of_grammar)
            mask &= of_grammar
        ban(mask, completions(self._bad_words, history))
        return mask


def completions(words: Sequence[Sequence[int]], history: np.ndarray) -> list[int]:
    """The last id of each word all of whose other ids end `history`."""
    longest = max(map(len, words), default=1)
    tail = history[max(0, len(history) - longest + 1) :].tolist()
    return [w[-1] for w in words if tail[max(0, len(tail) - len(w) + 1) :] == list(w[:-1])]


class Masks(LogitProcessor):
    """The masks of the table's rows, a bit for each token."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_rows, np.full(num_words(vocab_size), -1, np.int32), device)
        self._bits = upload(1 << np.arange(8, dtype=np.uint8), device)
        self._masks: dict[int, RowMask] = {}
        self._is_masked = np.zeros(num_rows, bool)
        self.reads_history = np.zeros(num_rows, bool)

    def admit(self, row: int, mask: RowMask) -> None:
        """The row has this one."""
        self._masks[row] = mask
        self._is_masked[row], self.reads_history[row] = True, mask.reads_history

    def release(self, row: int) -> None:
        """See `LogitProcessor`."""
        super().release(row)
        self._masks.pop(row, None)
        self._is_masked[row] = self.reads_history[row] = False

    def compose(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Brings the rows [R] to the positions [R]; `token_ids` [num_rows, max_model_len] holds the
        tokens before them, which only rows of `reads_history` read."""
        for at in np.flatnonzero(self._is_masked[rows]).tolist():
            row = rows[at]
            self.set(row, self._masks[row].at(token_ids[row, : positions[at]]))

    def apply(self, logits: Tensor, rows: Tensor, ops: Ops) -> None:
        """Sets to -inf what the rows may not draw."""
        octets = self.on_device.view(torch.uint8).index_select(0, rows)
        banned = (octets.unsqueeze(-1) & self._bits) == 0
        logits.masked_fill_(banned.flatten(1)[:, : logits.shape[1]], -torch.inf)
