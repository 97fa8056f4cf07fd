"""Single tokens as text and as bytes."""

import re
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
"""What decoders give for bytes that are no UTF-8."""

FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A byte token of a byte-fallback vocabulary."""


class TokenTexts:
    """What single tokens say; each is looked up once."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def text(self, token_id: int) -> str:
        r"""Text, as it stands after other text. A part of a character is `bytes:\xe2\x80`, and
        where there is no tokenizer it is `token_id:7`."""
        return self.look_up(token_id)[0]

    def look_up(self, token_id: int) -> tuple[str, list[int] | None]:
        """The text, and its bytes in UTF-8."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", None
        # Sentencepiece drops the space of the first token that it decodes, so it gets two.
        once, twice = (
            self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in ([token_id], [token_id, token_id])
        )
        if BROKEN not in twice:
            text = twice[len(once) :] if twice.startswith(once) else once
            return text, list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if match := FALLBACK_BYTE.fullmatch(piece):
            data = bytes([int(match[1], 16)])
        elif all(char in self._byte_of for char in piece):
            data = bytes(self._byte_of[char] for char in piece)
        else:
            data = twice[len(once) :].encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """How byte-level vocabularies write bytes."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {char: byte for byte, char in bytes_to_unicode().items()}
