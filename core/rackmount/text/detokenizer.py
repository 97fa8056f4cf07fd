"""Token ids to text as they come: never half a character, at a cost per token that stays the same.

Text is decoded in a window of two parts: context tokens, whose text is out and which only settle
how the next ones join it (sentencepiece drops the space of the first token that it sees), then
pending tokens, which have text to come. `DecodeStream` of the `tokenizers` library is quicker by
two microseconds a token, but it cannot flush, raises where a broken byte changes the text before
it, and holds everything back for as long as the text ends in U+FFFD.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
"""What decoders give for bytes that are not, or not yet, UTF-8."""

FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A byte token of a byte-fallback vocabulary."""

MAX_PENDING = 32
MIN_PENDING = 8
"""A window of more than `MAX_PENDING` pending tokens shrinks to `MIN_PENDING`, twice the bytes of a
character."""


class Detokenizer:
    """The text of one request's output.

    All pushes and the flush together equal `decode(prompt + output)` with the prompt's text cut
    off, without `clean_up_tokenization_spaces`. Nothing that comes bit by bit can equal it in one
    case: a byte-fallback decoder that meets a broken byte also gives up the whole characters right
    before it. They are out by then and stay.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._to_pieces = tokenizer.convert_ids_to_tokens
        self._restart(_visible_tail(prompt_token_ids, self._decode))

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete; bytes that a later token may complete are held."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What is still held, once, after the last push. U+FFFD in it is final."""
        text = self._pending_text()[self._num_sent :]
        self._restart(self._ids)
        return text

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._pending_text()
        num_held = self._num_unfinished(text) if text.endswith(BROKEN) else 0
        new = text[self._num_sent : len(text) - num_held]
        self._num_sent += len(new)
        if text and not num_held:
            self._restart(self._ids[self._num_context :])
        elif len(self._ids) - self._num_context > MAX_PENDING:
            self._shrink(num_unsent=len(text) - self._num_sent)
        return new

    def _restart(self, context: list[int]) -> None:
        """A window of context alone."""
        self._ids = context
        self._num_context = len(context)
        self._context = self._decode(context)
        self._num_sent = 0

    def _pending_text(self) -> str:
        """Text of the pending tokens, read by themselves where they change the context's text."""
        text = self._decode(self._ids)
        if text.startswith(self._context):
            return text[len(self._context) :]
        return self._decode(self._ids[self._num_context :])

    def _num_unfinished(self, text: str) -> int:
        """How many U+FFFD at the end of the pending `text` later tokens may change."""
        pieces = self._to_pieces(self._ids[self._num_context :])
        matches = [FALLBACK_BYTE.fullmatch(piece or "") for piece in pieces]
        data = bytes([int(match[1], 16) for match in matches if match])
        if not data:
            return 1  # of a byte-level decoder: one for all bytes of an unfinished character
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        broken = decoder.decode(data)  # had the bytes made a character, none would be pending
        # A fallback decoder gives one for each byte of the run, before and after it is broken.
        return len(decoder.getstate()[0]) if broken else len(text)

    def _shrink(self, num_unsent: int) -> None:
        """Drops pending tokens that no later text depends on.

        Skipped special tokens and ids that the tokenizer lacks go first; they have no text even
        when doubled, unlike a sentencepiece space. UTF-8 finds its place again after at most 3
        bytes, so the end of the text is the same wherever the rest is cut.
        """
        pending = [i for i in self._ids[self._num_context :] if self._decode([i, i])]
        if len(pending) <= MIN_PENDING:
            self._ids[self._num_context :] = pending
            return
        self._restart([])
        self._ids = pending[-MIN_PENDING:]
        self._num_sent = len(self._pending_text()) - num_unsent


def _decoder(
    tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool
) -> Callable[[list[int]], str]:
    """`tokenizer.decode`, where possible without its wrapper, which costs more than decoding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def _visible_tail(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """The shortest tail, of those tried, whose text starts with a whole character; else all ids."""
    size = 1
    while size < len(token_ids):
        tail = list(token_ids[-size:])
        text = decode(tail)
        if text and not text.startswith(BROKEN):
            return tail
        size = size + 1 if size < 4 else 2 * size  # every length of a character in bytes
    return list(token_ids)
