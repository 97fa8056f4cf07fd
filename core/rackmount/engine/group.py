"""The answers to one prompt on their way."""

from dataclasses import dataclass, field

from rackmount.engine.outputs import RequestOutput, TextChunk
from rackmount.engine.sequence import Sequence
from rackmount.scheduling.request import Request


@dataclass(kw_only=True)
class Group:
    """A prompt's `n` sequences with their requests, or the error that refused it."""

    prompt_index: int
    members: list[tuple[Request, Sequence]] = field(default_factory=list)
    error: ValueError | None = None

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self.members]

    def output(self) -> RequestOutput:
        """What `generate` gives, once every sequence has ended."""
        if self.error is not None:
            return RequestOutput(prompt_token_ids=[], error=self.error)
        first = self.sequences[0]
        wanted = first.params.prompt_logprobs is not None
        return RequestOutput(
            prompt_token_ids=first.prompt_token_ids,
            completions=[each.completion() for each in self.sequences],
            prompt_logprobs=first.prompt_logprobs if wanted else None,
            num_cached_tokens=first.num_cached_tokens,
        )

    def refusal(self) -> TextChunk:
        """What `stream` gives for a refused prompt."""
        return TextChunk(
            prompt_index=self.prompt_index,
            index=0,
            text="",
            token_ids=[],
            num_prompt_tokens=0,
            num_cached_tokens=0,
            finish_reason="error",
            error=self.error,
        )
