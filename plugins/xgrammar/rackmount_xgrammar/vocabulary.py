"""What the tokens of a tokenizer stand for."""

from typing import TYPE_CHECKING

import xgrammar

from rackmount_registry.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def texts_of(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> list[bytes]:
    """The bytes of each of `vocab_size` tokens; none for special tokens, and for ids that the
    tokenizer lacks.

    Raises:
        RequestError: a tokenizer that xgrammar cannot read.
    """
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=[0]
        )
    except ValueError as error:
        raise RequestError(f"grammars need another tokenizer: {error}") from error
    texts: list[bytes] = info.decoded_vocab
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token_id < vocab_size:  # spelled as they are, and not in the tokenizer's alphabet
            texts[token_id] = b"" if token.special else token.content.encode()
    for token_id in tokenizer.all_special_ids:
        if token_id < vocab_size:
            texts[token_id] = b""
    return texts
