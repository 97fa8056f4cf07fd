"""What the sampler knows of each row of the persistent batch."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rackmount.device import upload
from rackmount.sampling.biases import Biases
from rackmount.sampling.grammars import RowGrammar
from rackmount.sampling.masks import Masks, RowMask
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.penalties import Penalties
from rackmount.sampling.processor import LogitProcessor
from rackmount_registry.sampling import Draw, SamplingState

Numbers = tuple[float, float, float, float]
"""A row of `SamplingState.numbers`."""


class SamplingTable:
    """Per-row state for `max_num_seqs` requests and one row more, for padding, which asks for
    nothing; a step names the rows that it samples.

    What the device reads, in `state` and the processors, lies at fixed places, as of the last
    `flush`. What the host decides by is in numpy arrays.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        size = max_num_seqs + 1
        self.vocab_size = vocab_size
        self.device = device
        self.state = SamplingState.greedy(max_num_seqs, device)
        self._changed: dict[int, tuple[Draw, Numbers, int]] = {}
        """Draw, numbers and seed of the rows that `state` does not have yet."""
        self.masks = Masks(size, vocab_size, device)
        self.biases = Biases(size, vocab_size, device)
        self.penalties = Penalties(size, vocab_size, device)
        self.processors: list[LogitProcessor] = [self.masks, self.biases, self.penalties]
        """Of logits, in this order."""
        self.num_logprobs = np.full(size, -1)
        """-1: none are wanted."""

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
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        early = list(stop_ids) if params.min_tokens and not grammar else []
        if bad_words_ids or early or grammar or params.allowed_token_ids is not None:
            mask = RowMask(
                self.vocab_size,
                allowed=params.allowed_token_ids,
                grammar=grammar,
                bad_words=bad_words_ids,
                early=early,
                min_position=len(prompt_token_ids) + params.min_tokens,
            )
            self.masks.admit(row, mask)
        if params.logit_bias:
            self.biases.admit(row, params.logit_bias)
        self.penalties.admit(row, params, prompt_token_ids, output_token_ids)

    def release(self, row: int) -> None:
        """Frees a row and all that it holds; a free row may be released again."""
        self._changed.pop(row, None)
        self.num_logprobs[row] = -1
        for processor in self.processors:
            processor.release(row)

    def flush(self) -> None:
        """Brings the device up to date, in the order of the stream: before the next sampling.

        One copy carries what changed of `state`, and one of each processor; none where nothing did.
        """
        for processor in self.processors:
            processor.flush()
        if not self._changed:
            return
        packed = np.empty((len(self._changed), 7), np.int64)
        numbers = packed[:, 3:].view(np.float64)
        for at, (row, (draw, four, seed)) in enumerate(self._changed.items()):
            packed[at, :2] = row, draw
            packed[at, 2:3] = np.array([seed], np.uint64).view(np.int64)
            numbers[at] = four
        given = upload(packed, self.device)
        rows = given[:, 0]
        self.state.draws[rows] = given[:, 1].to(torch.int8)
        self.state.seeds[rows] = given[:, 2]
        self.state.numbers[rows] = given[:, 3:].view(torch.float64)
        self._changed.clear()  # last: what broke before is made up for

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
