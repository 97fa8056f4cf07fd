"""One request's output as text: the detokenizer and the stop strings together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rackmount.text.detokenizer import Detokenizer
from rackmount.text.stop import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What a push adds."""

    text: str
    finished_by: str | None
    """The stop string that ends the output with this piece."""


class TextStream:
    """Output tokens to the text that the user sees, piece by piece.

    The text of the first `min_tokens` tokens is exempt from stop strings, just as these tokens
    cannot be stop ids.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stops = StopStrings(stop, include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self.num_tokens = 0
        """Tokens taken; those pushed after the one that completes a stop string are not."""
        self.finished_by: str | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """The text that `token_ids` add. Not called after a stop string has ended the output."""
        assert self.finished_by is None
        first = len(self._pieces)
        for token_id in token_ids:
            self.num_tokens += 1
            self._add(self._detokenizer.push((token_id,)))
            if self.finished_by is not None:
                break
        return TextDelta(text="".join(self._pieces[first:]), finished_by=self.finished_by)

    def finish(self) -> str:
        """The text still held back, once, when no more tokens come; empty after a stop string."""
        if self.finished_by is not None:
            return ""
        first = len(self._pieces)
        self._add(self._detokenizer.flush())
        self._pieces.append(self._stops.flush())
        return "".join(self._pieces[first:])

    def _add(self, text: str) -> None:
        if self.num_tokens > self._min_tokens:
            text, self.finished_by = self._stops.push(text)
        if text:
            self._pieces.append(text)
