"""A sequence being answered: the engine's side of a request."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rackmount.engine.core import Event
from rackmount.engine.outputs import Completion, TextChunk
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.request import TokenLogprobs
from rackmount.scheduling.request import FinishReason
from rackmount.text.stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sequence:
    """Collects the events of one of a prompt's answers, as text where there is a tokenizer."""

    def __init__(
        self,
        request_id: str,
        prompt_index: int,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> None:
        self.request_id = request_id
        self.prompt_index = prompt_index
        self.index = index
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.sink: Callable[[TextChunk], None] | None = None
        """Where its chunks go; None where nobody streams it."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * len(prompt_token_ids)
        self.num_cached_tokens = 0
        self.arrived_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        """When they were taken, by the clock of `arrived_at`."""
        self.gaps: list[float] | None = None
        """Seconds between its tokens, for whoever sets a list here, and empties it."""
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        """See `Event`; None before the first token."""
        self._taken: Event | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._stream: TextStream | None = None
        if tokenizer is not None and params.detokenize:
            self._stream = TextStream(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    @property
    def text(self) -> str:
        return self._stream.text if self._stream else ""

    def take(self, event: Event) -> None:
        """Adds what a step did, as one chunk. Events after the end are of no interest, nor is one
        that comes again because an interrupt kept its taker from crossing it off."""
        if self.finish_reason is not None or event is self._taken:
            return
        self._taken = event
        if event.prompt_logprobs is not None:
            first, entries = event.prompt_logprobs
            self.prompt_logprobs[first : first + len(entries)] = entries
        finish_reason, stop_reason, text = event.finish_reason, event.stop_reason, ""
        if event.token_id is not None:
            self._note_time(event)
            self.num_cached_tokens = event.num_cached_tokens
            self.token_ids.append(event.token_id)
            if self.logprobs is not None and event.logprobs is not None:
                self.logprobs.append(event.logprobs)
            text = self._push(event)
        if self._stream and event.finish_reason is not None:
            text += self._stream.finish()
        if self._stream and self._stream.finished_by is not None:
            finish_reason, stop_reason = "stop", self._stream.finished_by
        if event.token_id is not None or finish_reason is not None:
            self._tell(text, event, finish_reason, stop_reason)

    def end(self, reason: FinishReason) -> None:
        """Ends it from outside where it stands; text that is held back stays so."""
        if self.finish_reason is None:
            self._tell("", Event(request_id=self.request_id), reason, None)

    def completion(self) -> Completion:
        """The whole answer, once finished."""
        assert self.finish_reason is not None
        return Completion(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
        )

    def _note_time(self, event: Event) -> None:
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
            self.queue_s, self.prefill_s = event.queue_s, event.prefill_s
        elif self.gaps is not None and self.last_token_at is not None:
            self.gaps.append(now - self.last_token_at)
        self.last_token_at = now

    def _push(self, event: Event) -> str:
        if self._stream is None or event.token_id is None:
            return ""
        if event.token_id == event.stop_reason and not self.params.include_stop_str_in_output:
            return ""  # a stop token is no part of the text, special or not
        return self._stream.push((event.token_id,)).text

    def _tell(
        self,
        text: str,
        event: Event,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> None:
        """Sends a chunk. The reason is noted last: whatever is raised before, an interrupt even,
        leaves a sequence that has not ended, and that `end` can end."""
        chunk = TextChunk(
            prompt_index=self.prompt_index,
            index=self.index,
            text=text,
            token_ids=[] if event.token_id is None else [event.token_id],
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            logprobs=[event.logprobs] if event.logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        if self.sink is not None:
            self.sink(chunk)
        self.stop_reason = stop_reason
        self.finish_reason = finish_reason
