"""The mask of a grammar on logits, and how it follows a row, over a grammar made up here."""

import subprocess
import sys
from collections.abc import Callable, Collection
from concurrent.futures import Future
from threading import Event
from time import sleep

import numpy as np
import pytest
import torch
from tests.helpers.sampling import sample

from rackmount.config import EngineConfig
from rackmount.sampling.grammars import COMPILE_S, Grammars, RowGrammar
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.request import SamplingRequest
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount_registry.errors import RequestError
from rackmount_registry.grammar import Grammar, GrammarSpec
from rackmount_registry.ops import reference_ops
from rackmount_registry.plugins import PluginManager

VOCAB, END = 97, 96
PROMPT = [5, 6, 7]
EVERY: Callable[[int], set[int]] = lambda last: set(range(VOCAB))  # noqa: E731


class Follows:
    """A grammar and its matchers: after a token `last`, 0 at first, comes one of `next_of(last)`,
    or the end."""

    def __init__(self, next_of: Callable[[int], set[int]] = EVERY) -> None:
        self.next_of, self.last, self.is_terminated = next_of, 0, False
        self.taken: list[int] = []

    def matcher(self, end_ids: Collection[int]) -> "Follows":
        assert set(end_ids) == {END}
        return Follows(self.next_of)

    def accept(self, token_id: int) -> bool:
        self.taken.append(token_id)
        if self.is_terminated or token_id not in self.next_of(self.last):
            return False
        self.last, self.is_terminated = token_id, token_id == END
        return True

    def fill_bitmask(self, bitmask: np.ndarray) -> None:
        marks = np.zeros(32 * len(bitmask), bool)
        marks[list(self.next_of(self.last))] = True
        bitmask[:] = np.packbits(marks, bitorder="little").view(np.int32)


def row_grammar(
    grammar: Grammar | Exception | Future[Grammar],
    compile_s: float = COMPILE_S,
    **params: object,
) -> RowGrammar:
    given = SamplingParams(grammar=GrammarSpec(regex="-"), **params)
    future: Future[Grammar] = Future()
    if isinstance(grammar, Future):
        future = grammar
    elif isinstance(grammar, Exception):
        future.set_exception(grammar)
    else:
        future.set_result(grammar)
    ends = frozenset({END})
    request = SamplingRequest(
        params=given, seed=0, bad_words_ids=[], stop_ids=ends | {9}, end_ids=ends
    )
    return RowGrammar(future, request, len(PROMPT), VOCAB, compile_s)


def allowed(grammar: RowGrammar, output: list[int]) -> set[int]:
    bitmask = np.full(4, 0x5A5A5A5A, np.int32)
    grammar.fill_bitmask(np.array(PROMPT + output, np.int32), bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


def pairs(last: int) -> set[int]:
    return {last + 1, last + 2} if last < 8 else {END}


def test_it_reads_each_token_of_the_output_once_and_none_of_the_prompt() -> None:
    grammar = row_grammar(Follows(pairs))
    assert allowed(grammar, []) == {1, 2}
    assert allowed(grammar, [2]) == allowed(grammar, [2]) == {3, 4}
    assert allowed(grammar, [2, 4, 5]) == {6, 7}
    matcher = grammar._matcher
    assert isinstance(matcher, Follows) and matcher.taken == [2, 4, 5]


def test_a_row_that_comes_back_reads_its_output_again() -> None:
    assert allowed(row_grammar(Follows(pairs)), [2, 4, 5]) == {6, 7}


@pytest.mark.parametrize("output", [[3], [2, 9], [2, 4, 6, 8, END], [2, 4, 6, 8, END, END]])
def test_nothing_follows_the_end_or_what_has_no_place(output: list[int]) -> None:
    grammar = row_grammar(Follows(pairs))
    assert allowed(grammar, output) == set()
    assert allowed(grammar, [*output, 1]) == set()


def test_a_grammar_that_does_not_compile_after_all_leaves_its_row_nothing() -> None:
    assert allowed(row_grammar(RequestError("too late")), []) == set()


def test_a_grammar_that_does_not_compile_in_time_fails_its_row_alone() -> None:
    late: Future[Grammar] = Future()
    grammar = row_grammar(late, compile_s=0.05)
    assert allowed(grammar, []) == set()
    late.set_result(Follows())
    assert allowed(grammar, []) == set()


def test_a_process_that_ends_as_its_backend_is_made_waits_for_that() -> None:
    """An extension module whose import is cut off calls `std::terminate`: SIGABRT, now and then."""
    text = """
import time
from rackmount.config import EngineConfig
from rackmount.sampling.grammars import Grammars
from rackmount_registry.plugins import PluginManager

def tokenizer():
    time.sleep(0.5)
    print("made")

Grammars(EngineConfig.create(model="-"), PluginManager.discover(), tokenizer, 97).prepare()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")


class Slow:
    """A backend that compiles when told to."""

    def __init__(self) -> None:
        self.begun: list[GrammarSpec] = []
        self.go = Event()

    def compile(self, spec: GrammarSpec) -> Follows:
        self.begun.append(spec)
        assert self.go.wait(30)
        return Follows()


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled() -> None:
    """One compiles at a time: the others would take the cores from everybody's steps."""
    config = EngineConfig.create(model="-")
    grammars = Grammars(config, PluginManager.discover(), lambda: None, VOCAB)
    backend = Slow()
    grammars._made = backend  # type: ignore[assignment]  # compiles, and checks nothing

    def follow(text: str) -> RowGrammar:
        params = SamplingParams(grammar=GrammarSpec(regex=text))
        ends = frozenset({END})
        request = SamplingRequest(
            params=params, seed=0, bad_words_ids=[], stop_ids=ends, end_ids=ends
        )
        row = grammars.follow(request, len(PROMPT))
        assert row is not None
        return row

    first = follow("a")
    while not backend.begun:
        sleep(0.001)
    follow("b")  # its request ends before its turn comes
    third = follow("c")
    backend.go.set()
    assert allowed(first, []) and allowed(third, [])
    assert [spec.regex for spec in backend.begun] == ["a", "c"]


def test_stop_ids_wait_for_min_tokens_where_something_else_is_allowed() -> None:
    grammar = row_grammar(Follows(lambda last: {4, 9, END} if last < 5 else {END}), min_tokens=2)
    assert allowed(grammar, []) == {4}
    assert allowed(grammar, [4, 4]) == {4, 9, END}
    short = row_grammar(Follows(lambda last: {5} if last == 0 else {END}), min_tokens=3)
    assert allowed(short, [5]) == {END}


def test_logits_are_masked_bit_by_bit_in_the_rows_that_have_a_grammar() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=generator)
    table = SamplingTable(6, VOCAB, torch.device("cpu"))
    token_ids = np.zeros((7, 16), np.int32)
    token_ids[:, :3] = PROMPT
    sets = {4: set(range(0, VOCAB, 3)), 1: {31, 32, 63, 64, 95, 96}}
    params = SamplingParams(temperature=0, logprobs=0)
    for row in (4, 0, 1, 5):
        grammar = row_grammar(Follows(lambda last, row=row: sets[row])) if row in sets else None
        table.admit(row, params, seed=0, prompt_token_ids=PROMPT, grammar=grammar)
        assert table.masks.reads_history[row] == (row in sets)
    rows = np.array([4, 0, 1, 5])
    before = logits.clone()
    sampled = sample(table, logits, rows, np.full(4, 3), token_ids)
    processed = Sampler(table, reference_ops()).process(before, torch.from_numpy(rows))
    expected = before.clone()
    for at, row in enumerate(rows.tolist()):
        for token_id in range(VOCAB):
            if token_id not in sets.get(row, range(VOCAB)):
                expected[at, token_id] = -torch.inf
    torch.testing.assert_close(processed, expected, rtol=0, atol=0)
    assert sampled.token_ids.tolist() == expected.argmax(-1).tolist()
    assert sampled.logprobs is not None  # of the model's own distribution
    own = before.log_softmax(-1).gather(1, expected.argmax(-1, keepdim=True))
    torch.testing.assert_close(sampled.logprobs.logprobs, own)


def test_a_row_to_which_nothing_is_left_has_no_token() -> None:
    table = SamplingTable(1, VOCAB, torch.device("cpu"))
    grammar = row_grammar(Follows(lambda last: {4}))
    params = SamplingParams(allowed_token_ids=[5])
    table.admit(0, params, seed=0, prompt_token_ids=PROMPT, grammar=grammar)
    token_ids = np.array([PROMPT])
    sampled = sample(table, torch.zeros(1, VOCAB), np.array([0]), np.array([3]), token_ids)
    assert sampled.token_ids.tolist() == [-1]
