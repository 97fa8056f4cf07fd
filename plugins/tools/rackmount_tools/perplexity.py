"""Perplexity of a text, in windows that fit a model.

Definition. The text becomes token ids x_0 .. x_(n-1), all at once and without special tokens.
Windows begin at 0, stride, 2 stride, ... and have `context` tokens; each begins with the special
token that the tokenizer puts before a text (BOS), if it does, which takes one of these places and
is never scored. The last window ends with the text. In each window those tokens are scored that no
window before it has reached and that have a token before them in it: with a stride below the
context each has at least context - stride tokens before it, but for those of the first window.

With -log p of each scored token, given those before it in its window, summed over all of them:
perplexity = exp(sum / tokens), bits per byte = sum / (ln 2 * bytes), where bytes are those of the
scored text in UTF-8. Each token counts the same, whatever window it is in. With stride = context
and no BOS these are disjoint windows; the loop is that of "Perplexity of fixed-length models" in
transformers' docs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rackmount import Engine, SamplingParams
from rackmount_registry.checkpoint import Report, silent
from rackmount_registry.errors import ConfigError, RackmountError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_CONTEXT = 1024
AT_ONCE = 64
"""Windows that are handed to the engine together."""


@dataclass(frozen=True, kw_only=True)
class Window:
    token_ids: list[int]
    num_scored: int
    """Of the last tokens."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A sum over scored tokens, and what follows from it."""

    nats: float
    """-log p, summed."""
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / (math.log(2) * self.num_bytes)


def require_stride(stride: int, context: int, bos: int | None = None) -> None:
    """ConfigError for a stride that would leave tokens out."""
    room = context - (bos is not None)
    if not 1 <= stride <= room:
        behind = "" if bos is None else " behind the one that begins it"
        raise ConfigError(
            f"stride={stride} must be 1 to {room}, the tokens of text that a window of "
            f"context={context} holds{behind}"
        )


def windows_of(ids: Sequence[int], context: int, stride: int, bos: int | None) -> list[Window]:
    """The windows of a text, each with a token to score.

    Raises:
        ConfigError: as for `require_stride`; or a text of which nothing can be scored.
    """
    require_stride(stride, context, bos)
    before = [] if bos is None else [bos]
    room = context - len(before)
    if len(ids) + len(before) < 2:
        raise ConfigError(
            f"a text of {len(ids)} tokens has none that follows another; give "
            f"{2 - len(before)} or more"
        )
    windows, reached = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + room, len(ids))
        first = max(reached, begin + 1 - len(before))
        if first < end:
            token_ids = [*before, *ids[begin:end]]
            windows.append(Window(token_ids=token_ids, num_scored=end - first))
        reached = end
        if end == len(ids):
            break
    return windows


def leading_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """What the tokenizer puts before a text: BOS, or nothing."""
    ids = tokenizer.encode("a")
    return tokenizer.bos_token_id if ids[0] == tokenizer.bos_token_id else None


def measure_perplexity(
    engine: Engine,
    text: str,
    *,
    context: int,
    stride: int,
    max_tokens: int | None = None,
    report: Report = silent,
) -> Perplexity:
    """Of the text's first `max_tokens` tokens, all of them by default.

    Args:
        engine: with room for context + 1 tokens.

    Raises:
        ConfigError: as for `windows_of`; or the model has no tokenizer.
        RackmountError: the model gives NaN.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer to read a text with")
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)[:max_tokens]
    windows = windows_of(ids, context, stride, leading_token(tokenizer))
    nats = [value for window in score(engine, windows, report) for value in window]
    scored = [id for window in windows for id in window.token_ids[-window.num_scored :]]
    spelled = tokenizer.decode(scored, clean_up_tokenization_spaces=False)
    return Perplexity(nats=math.fsum(nats), num_tokens=len(nats), num_bytes=len(spelled.encode()))


def score(
    engine: Engine, windows: Sequence[Window], report: Report = silent
) -> Iterator[list[float]]:
    """-log p of each window's scored tokens.

    Raises:
        RackmountError: the model gives NaN.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    for start in range(0, len(windows), AT_ONCE):
        some = windows[start : start + AT_ONCE]
        outputs = engine.generate([window.token_ids for window in some], params)
        for index, (window, output) in enumerate(zip(some, outputs, strict=True), start):
            ended = output.outputs[0].finish_reason
            found = (output.prompt_logprobs or [])[-window.num_scored :]
            nats = [-each.logprob for each in found if each is not None]
            if ended == "error" or any(map(math.isnan, nats)):
                raise RackmountError(
                    f"the model gives NaN for the text in window {index + 1} of {len(windows)}"
                )
            assert len(nats) == window.num_scored, "each was asked for"
            yield nats
        report("score", min(start + AT_ONCE, len(windows)), len(windows))
