"""What the sampler knows of each row of the persistent batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.grammars import RowGrammar
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.penalties import Penalties
from rackmount_registry.sampling import Draw, SamplingState

Numbers = tuple[float, float, float, float]
"""A row of `SamplingState.numbers`."""


@dataclass(frozen=True, kw_only=True)
class LogitRules:
    """Changes of one row's logits that few requests ask for."""

    banned: Tensor | None
    """bool [V] on the device: what `allowed_token_ids` leaves out."""
    grammar: RowGrammar | None
    bias: dict[int, float]
    bad_words: list[list[int]]
    stop_ids: list[int]
    """Banned below `min_position`."""
    min_position: int


class SamplingTable:
    """Per-row state for `max_num_seqs` requests and one row more, for padding, which asks for
    nothing; a step names the rows that it samples.

    What the device reads is in `state`, as of the last `flush`. What the host decides by is in
    numpy arrays, and what few requests ask for is held for their rows alone.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        size = max_num_seqs + 1
        self.vocab_size = vocab_size
        self.device = device
        self.state = SamplingState.greedy(max_num_seqs, device)
        self._changed: dict[int, tuple[Draw, Numbers, int]] = {}
        """Draw, numbers and seed of the rows that `state` does not have yet."""
        self.num_logprobs = np.full(size, -1)
        """-1: none are wanted."""
        self.has_rules = np.zeros(size, bool)
        self.reads_history = np.zeros(size, bool)
        """Rows whose rules read the tokens before the position."""
        self.rules: dict[int, LogitRules] = {}
        self.penalties = Penalties(size, vocab_size, device)

    def admit(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
        stop_ids: Iterable[int] = (),
        grammar: RowGrammar | None = None,
    ) -> None:
        """Gives a row to a request; with the outputs so far, the state is what it was with them.

        `params` have passed `validate_for`. `seed`, below 2**64, is theirs or drawn by the engine.
        `bad_words_ids` are the words' tokens, none of them empty. `stop_ids` are what `min_tokens`
        bans: `params.stop_ids(eos_token_ids)`; a `grammar` sees to that itself.
        """
        self.release(row)
        self._changed[row] = *self._draw(params), seed
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
        self.penalties.admit(row, params, prompt_token_ids, output_token_ids)
        bias = dict(params.logit_bias or {})
        stop_ids = list(stop_ids) if params.min_tokens and not grammar else []
        if bias or bad_words_ids or stop_ids or grammar or params.allowed_token_ids is not None:
            self.has_rules[row] = True
            self.reads_history[row] = bool(grammar) or any(len(word) > 1 for word in bad_words_ids)
            self.rules[row] = LogitRules(
                banned=self._banned(params.allowed_token_ids),
                grammar=grammar,
                bias=bias,
                bad_words=[list(word) for word in bad_words_ids],
                stop_ids=stop_ids,
                min_position=len(prompt_token_ids) + params.min_tokens,
            )

    def release(self, row: int) -> None:
        """Frees a row and all that it holds; a free row may be released again."""
        self._changed.pop(row, None)
        self.num_logprobs[row] = -1
        self.has_rules[row] = self.reads_history[row] = False
        self.rules.pop(row, None)
        self.penalties.release(row)

    def flush(self) -> None:
        """Brings `state` up to date, in the order of the stream: before the next sampling.

        One copy carries all rows that were admitted since; nothing where none was.
        """
        if not self._changed:
            return
        packed = np.empty((len(self._changed), 7), np.int64)
        numbers = packed[:, 3:].view(np.float64)
        for at, (row, (draw, four, seed)) in enumerate(self._changed.items()):
            packed[at, :2] = row, draw
            packed[at, 2:3] = np.array([seed], np.uint64).view(np.int64)
            numbers[at] = four
        self._changed.clear()
        given = upload(packed, self.device)
        rows = given[:, 0]
        self.state.draws[rows] = given[:, 1].to(torch.int8)
        self.state.seeds[rows] = given[:, 2]
        self.state.numbers[rows] = given[:, 3:].view(torch.float64)

    def _draw(self, params: SamplingParams) -> tuple[Draw, Numbers]:
        """What `state` holds of a request's parameters."""
        if params.greedy:
            return Draw.GREEDY, (0, 0, 0, 0)
        top_k = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        top_p = params.top_p if params.top_p < 1 else 2  # clear of the rounding of a total
        # Within float32; a temperature of 1e30 is as flat as any above.
        temperature = min(params.temperature, 1e30)
        min_logit = float(np.log(params.min_p)) if params.min_p else -np.inf
        numbers = temperature, top_k, top_p, min_logit
        if top_k < self.vocab_size:
            return Draw.TOP_K, numbers
        return Draw.TOP_P if top_p < 1 else Draw.WHOLE, numbers

    def _banned(self, allowed: list[int] | None) -> Tensor | None:
        if allowed is None:
            return None
        banned = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
        return banned.index_fill_(0, upload(np.array(allowed), self.device), False)
