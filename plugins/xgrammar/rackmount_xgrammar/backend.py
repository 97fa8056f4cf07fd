"""Grammars by xgrammar: https://arxiv.org/abs/2411.15100."""

import json
import os
import re
from collections.abc import Collection
from functools import cached_property
from threading import Lock

import numpy as np
import xgrammar

from rackmount_registry.errors import RequestError
from rackmount_registry.grammar import GrammarContext, GrammarSpec
from rackmount_xgrammar.schema import check_schema
from rackmount_xgrammar.vocabulary import texts_of

MOST_THREADS = 4
"""Of one compilation, and no more than half of the cores: the steps need the others."""
CACHE_BYTES = 2**28
"""Of compiled grammars that are kept."""
MAX_CHOICES = 1000
MAX_BYTES = {"json_schema": 2**15, "regex": 2**11, "choice": 2**14, "ebnf": 2**14}
"""Of a grammar's text, by form: compile time grows with its square. Where nothing but the length
makes them slow, grammars of these sizes compile in 0.2 s or so."""
MAX_WHITESPACE = 32
"""Most characters of white space in one place of JSON: a model that is lost may else write nothing
but these."""
CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")
"""What no JSON needs: in strings it is escaped, and white space is as well written without.
xgrammar 0.2.9 lets it into strings of a bounded length."""
ORIGIN = re.compile(r"^\[[\d:]+\] \S+: (Check failed: .* is false: )?", re.DOTALL)
"""What stands before xgrammar's own words in its errors."""


class XGrammar:
    """A `rackmount_registry.grammar.GrammarBackend`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._lock = Lock()
        """The vocabulary is read once, whoever asks first."""

    def check(self, spec: GrammarSpec) -> None:
        self._bytes.compile(spec)

    def compile(self, spec: GrammarSpec) -> "XGrammarGrammar":
        with self._lock:
            is_json = spec.json_object or spec.json_schema is not None
            compiler = self._json_tokens if is_json else self._tokens
        return compiler.compile(spec)

    @cached_property
    def _bytes(self) -> "Compiler":
        return Compiler([bytes([value]) for value in range(256)])

    @cached_property
    def _tokens(self) -> "Compiler":
        return Compiler(texts_of(self._context.tokenizer, self._context.vocab_size))

    @cached_property
    def _json_tokens(self) -> "Compiler":
        return Compiler([b"" if CONTROL.search(text) else text for text in self._tokens.texts])


class Compiler:
    """Compiles grammars over tokens that stand for `texts`; an empty one is no token."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts
        info = xgrammar.TokenizerInfo(texts, stop_token_ids=[])
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads(), cache_limit_bytes=CACHE_BYTES
        )

    def compile(self, spec: GrammarSpec) -> "XGrammarGrammar":
        """RequestError where xgrammar does not, or cannot, keep an answer to it."""
        _check_size(spec)
        if spec.json_schema is not None:
            check_schema(spec.json_schema)
        try:
            compiled = _compile(self._compiler, spec)
        except RuntimeError as error:  # xgrammar has no other
            reason = " ".join(ORIGIN.sub("", str(error)).split())
            raise RequestError(f"{spec.form}: {reason[:500]}") from error
        grammar = XGrammarGrammar(compiled, self.texts)
        if not grammar.matcher(()).may_begin():
            raise RequestError(f"{spec.form}: there is no text that it allows")
        return grammar


class XGrammarGrammar:
    """A `rackmount_registry.grammar.Grammar`."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, texts: list[bytes]) -> None:
        self.compiled, self.texts = compiled, texts

    def matcher(self, end_ids: Collection[int]) -> "XGrammarMatcher":
        return XGrammarMatcher(self, frozenset(end_ids))


class XGrammarMatcher:
    """A `rackmount_registry.grammar.Matcher`. xgrammar knows of no end: those are written over its
    mask."""

    def __init__(self, grammar: XGrammarGrammar, end_ids: frozenset[int]) -> None:
        self.is_terminated = False
        self._texts, self._end_ids = grammar.texts, end_ids
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)

    def may_begin(self) -> bool:
        """Whether there is a token that may come, or the end."""
        bitmask = np.zeros(-(-len(self._texts) // 32), np.int32)
        self._matcher.fill_next_token_bitmask(bitmask)
        return bool(bitmask.any()) or self._matcher.is_completed()

    def accept(self, token_id: int) -> bool:
        if self.is_terminated:
            return False
        if token_id in self._end_ids:
            self.is_terminated = self._matcher.is_completed()
            return self.is_terminated
        return bool(self._texts[token_id]) and self._matcher.accept_token(token_id)

    def fill_bitmask(self, bitmask: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(bitmask)
        words, may_end = bitmask.view(np.uint32), self._matcher.is_completed()
        for token_id in self._end_ids:
            word, bit = token_id // 32, np.uint32(1 << token_id % 32)
            words[word] = words[word] | bit if may_end else words[word] & ~bit


def _check_size(spec: GrammarSpec) -> None:
    if spec.choice is not None and len(spec.choice) > MAX_CHOICES:
        raise RequestError(f"choice: {len(spec.choice)} texts; at most {MAX_CHOICES} are taken")
    text = spec.json_schema or spec.regex or spec.ebnf or "".join(spec.choice or ())
    num_bytes = len(text.encode())
    if text and num_bytes > MAX_BYTES[spec.form]:
        raise RequestError(
            f"{spec.form}: {num_bytes} bytes of text; at most {MAX_BYTES[spec.form]} are taken"
        )


def num_threads() -> int:
    """Of one compilation."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


def _compile(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    if spec.json_schema is not None:
        return compiler.compile_json_schema(spec.json_schema, max_whitespace_cnt=MAX_WHITESPACE)
    if spec.json_object:
        return compiler.compile_json_schema(
            '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
        )
    if spec.regex is not None:
        return compiler.compile_regex(spec.regex)
    if spec.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
        return compiler.compile_grammar(f"root ::= {texts}")
    assert spec.ebnf is not None
    return compiler.compile_grammar(spec.ebnf)
