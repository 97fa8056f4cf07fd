"""What the sampler knows of each row of the persistent batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from rackmount.sampling.params import SamplingParams
from rackmount.sampling.penalties import Penalties


class Draw(IntEnum):
    """How a row's token is found: by its own parameters, never by its batch-mates'."""

    GREEDY = 0
    WHOLE = 1
    """From the whole vocabulary, unordered: neither top-k nor top-p."""
    TOP_K = 2
    """From the k most likely tokens."""
    TOP_P = 3
    """From the whole vocabulary in order: top-p without top-k."""


@dataclass(frozen=True, kw_only=True)
class LogitRules:
    """Changes of one row's logits that few requests ask for."""

    banned: Tensor | None
    """bool [V] on the device: what `allowed_token_ids` leaves out."""
    bias: dict[int, float]
    bad_words: list[list[int]]
    stop_ids: list[int]
    """Banned below `min_position`."""
    min_position: int


class SamplingTable:
    """Per-row state for `max_num_seqs` slots; a step names the rows that it samples.

    Plain numbers are numpy arrays, gathered by row each step; what few requests ask for is held
    for their rows alone.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.draws = np.zeros(max_num_seqs, np.int8)
        self.numbers = np.zeros((max_num_seqs, 4))
        """Temperature, top_k (off: the vocabulary's size), top_p (off: 2), log(min_p)."""
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1)
        """-1: none are wanted."""
        self.has_rules = np.zeros(max_num_seqs, bool)
        self.rules: dict[int, LogitRules] = {}
        self.penalties = Penalties(max_num_seqs, vocab_size, device)

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
    ) -> None:
        """Gives a row to a request; with the outputs so far, the state is what it was with them.

        `params` have passed `validate_for`. `seed`, below 2**64, is theirs or drawn by the engine.
        `bad_words_ids` are the words' tokens, none of them empty. `stop_ids` are what `min_tokens`
        bans: `params.stop_ids(eos_token_ids)`.
        """
        self.release(row)
        self.seeds[row] = seed
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
        if not params.greedy:
            self._admit_draw(row, params)
        self.penalties.admit(row, params, prompt_token_ids, output_token_ids)
        bias = dict(params.logit_bias or {})
        stop_ids = list(stop_ids) if params.min_tokens else []
        if bias or bad_words_ids or stop_ids or params.allowed_token_ids is not None:
            self.has_rules[row] = True
            self.rules[row] = LogitRules(
                banned=self._banned(params.allowed_token_ids),
                bias=bias,
                bad_words=[list(word) for word in bad_words_ids],
                stop_ids=stop_ids,
                min_position=len(prompt_token_ids) + params.min_tokens,
            )

    def release(self, row: int) -> None:
        """Frees a row and all that it holds; a free row may be released again."""
        self.draws[row] = Draw.GREEDY
        self.num_logprobs[row] = -1
        self.has_rules[row] = False
        self.rules.pop(row, None)
        self.penalties.release(row)

    def _admit_draw(self, row: int, params: SamplingParams) -> None:
        top_k = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        top_p = params.top_p if params.top_p < 1 else 2  # clear of the rounding of a total
        # Within float32; a temperature of 1e30 is as flat as any above.
        temperature = min(params.temperature, 1e30)
        min_logit = np.log(params.min_p) if params.min_p else -np.inf
        self.numbers[row] = temperature, top_k, top_p, min_logit
        if top_k < self.vocab_size:
            self.draws[row] = Draw.TOP_K
        else:
            self.draws[row] = Draw.TOP_P if top_p < 1 else Draw.WHOLE

    def _banned(self, allowed: list[int] | None) -> Tensor | None:
        if allowed is None:
            return None
        banned = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
        banned[torch.tensor(allowed, device=self.device)] = False
        return banned
