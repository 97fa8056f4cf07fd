"""Grammars over tokens of one byte each."""

from functools import cache

import numpy as np
from tests.helpers.engines import EOS, NUM_BYTE_IDS, byte_tokenizer

from rackmount_registry.grammar import Grammar, GrammarContext, Matcher
from rackmount_xgrammar.backend import XGrammar


@cache
def byte_backend() -> XGrammar:
    """Over `byte_tokenizer` and one id more, that it lacks."""
    return XGrammar(GrammarContext(tokenizer=byte_tokenizer(), vocab_size=NUM_BYTE_IDS))


def allowed(matcher: Matcher, vocab_size: int = NUM_BYTE_IDS) -> list[int]:
    """The ids that may come next."""
    bitmask = np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)
    matcher.fill_bitmask(bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size]).tolist()


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether `text`, and then the end, is an answer."""
    matcher = grammar.matcher([EOS])
    return all(map(matcher.accept, [*text.encode(), EOS]))
