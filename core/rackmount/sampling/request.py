"""What travels with a request from the engine to the sampler's table."""

from dataclasses import dataclass

from rackmount.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """One sequence's sampling, with everything resolved that only the engine knows."""

    params: SamplingParams
    seed: int
    bad_words_ids: list[list[int]]
    stop_ids: frozenset[int]
    end_ids: frozenset[int] = frozenset()
    """With a grammar: of the stop ids, those that may come only where its text is whole."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities in the place of one token, of the model's unprocessed distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: dict[int, float]
    """The most likely tokens, as many as were asked for."""
