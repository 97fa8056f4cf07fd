"""What the engine gives back."""

from dataclasses import dataclass, field

from rackmount.sampling.request import TokenLogprobs
from rackmount.scheduling.request import FinishReason


@dataclass(kw_only=True)
class Completion:
    """One answer."""

    index: int
    text: str
    """Empty with `detokenize=False` or without a tokenizer."""
    token_ids: list[int]
    """Every token sampled, the one that ended it included."""
    finish_reason: FinishReason
    """"stop", "length", "abort", or "error" where the model's logits left nothing to sample."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""
    logprobs: list[TokenLogprobs] | None = None


@dataclass(kw_only=True)
class RequestOutput:
    """The answers to one prompt, or the error that refused it."""

    prompt_token_ids: list[int]
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token; None for the first, which nothing predicts."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    error: ValueError | None = None
    """Why this prompt of a batch was refused, the others being served. Reading its answer raises
    it."""

    @property
    def outputs(self) -> list[Completion]:
        """All `n` answers."""
        if self.error is not None:
            raise self.error
        return self.completions

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's tokens."""
        return self.outputs[0].token_ids


@dataclass(frozen=True, kw_only=True)
class TextChunk:
    """A piece of a streamed answer; the texts of one answer's chunks together are its text."""

    prompt_index: int
    index: int
    """Which of the `n` answers."""
    text: str
    """May be empty: bytes of an unfinished character, or what may become a stop string, are held
    back."""
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, how many the prefix cache held."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    """Set in the last chunk of each answer."""
    stop_reason: int | str | None = None
    error: ValueError | None = None
    """Why this prompt of a batch was refused: its only chunk, with the reason "error"."""
