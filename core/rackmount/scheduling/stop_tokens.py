"""Which tokens may end some request: a filter before each request's own set is asked."""

from collections import Counter
from collections.abc import Iterable

import numpy as np


class StopTokens:
    def __init__(self, vocab_size: int) -> None:
        self.marks = np.zeros(vocab_size, np.bool_)
        """bool [vocab_size]: whether any holder stops at the token."""
        self._holders: Counter[int] = Counter()

    def hold(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._holders[token_id] += 1
            self.marks[token_id] = True

    def drop(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._holders[token_id] -= 1
            if not self._holders[token_id]:
                del self._holders[token_id]
                self.marks[token_id] = False
