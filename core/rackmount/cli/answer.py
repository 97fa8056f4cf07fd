"""One answer: handed on as it comes, counted and timed."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rackmount.engine.engine import Engine
from rackmount.sampling.params import SamplingParams
from rackmount.scheduling.request import FinishReason
from rackmount.text.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache held."""
    seconds_to_first: float
    """From the prompt to the first token, tokenizing included."""
    seconds: float
    """From the prompt to the last token."""

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second from the first to the last; None where there are not two."""
        num_after_first = len(self.token_ids) - 1
        if num_after_first < 1:
            return None
        return num_after_first / (self.seconds - self.seconds_to_first)

    def __str__(self) -> str:
        rate = "" if self.decode_rate is None else f" at {self.decode_rate:.1f} tokens/s"
        end = "" if self.finish_reason == "stop" else f", ended by {self.finish_reason}"
        if self.finish_reason == "error":
            end += ": the model's logits left no token to sample"
        return (
            f"{len(self.token_ids)} tokens{rate}, the first after {self.seconds_to_first:.2f} s; "
            f"prompt of {self.num_prompt_tokens}, {self.num_cached_tokens} of them cached{end}"
        )

    def as_plain(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.num_prompt_tokens,
                "cached_tokens": self.num_cached_tokens,
                "completion_tokens": len(self.token_ids),
            },
            "timings": {
                "time_to_first_token_s": self.seconds_to_first,
                "total_s": self.seconds,
                "decode_tokens_per_s": self.decode_rate,
            },
        }


def answer(
    engine: Engine, prompt: Prompt, params: SamplingParams, write: Callable[[str], object]
) -> Answer:
    """Answers `prompt` alone and gives each piece of text to `write`.

    Raises:
        RequestError: the prompt is refused.
    """
    start = perf_counter()
    texts: list[str] = []
    token_ids: list[int] = []
    times: list[float] = []
    for chunk in engine.stream(prompt, params):
        times.append(perf_counter() - start)
        texts.append(chunk.text)
        token_ids += chunk.token_ids
        write(chunk.text)
    assert chunk.finish_reason is not None, "a stream ends with a reason"
    return Answer(
        text="".join(texts),
        token_ids=token_ids,
        finish_reason=chunk.finish_reason,
        num_prompt_tokens=chunk.num_prompt_tokens,
        num_cached_tokens=chunk.num_cached_tokens,
        seconds_to_first=times[0],
        seconds=times[-1],
    )
