"""Grammars of requests: held at the door, compiled beside the steps, followed row by row."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import ref

import numpy as np

from rackmount.config import EngineConfig
from rackmount.rack import choose_grammar_backend
from rackmount.sampling.bitmask import ban, num_words
from rackmount.sampling.request import SamplingRequest
from rackmount_registry.errors import RackmountError, RequestError
from rackmount_registry.grammar import (
    Grammar,
    GrammarBackend,
    GrammarContext,
    GrammarSpec,
    Matcher,
)
from rackmount_registry.options import instantiate, parse_options
from rackmount_registry.plugins import PluginManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

CHECK_S = 1.0
"""Most seconds that the door waits for the check of a grammar."""

COMPILE_S = 10.0
"""Most seconds that a step waits for a grammar, from when its request is admitted."""
FOLLOWER_COMPILE_S = 2 * COMPILE_S
"""The same of a rank whose answer nobody reads. Were it to give up a grammar that the first rank
follows, it would go on with another token: it gives up later than that one."""


class Grammars:
    """The grammar backend of one process, made when a request first needs it.

    Args:
        tokenizer: gives the model's, if it has one; called at most once.
        vocab_size: of the model.
        compile_s: `COMPILE_S`, or that of a follower.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: PluginManager,
        tokenizer: "Callable[[], PreTrainedTokenizerBase | None]",
        vocab_size: int,
        compile_s: float = COMPILE_S,
    ) -> None:
        self.vocab_size = vocab_size
        self._compile_s = compile_s
        self._offer = choose_grammar_backend(config, manager)
        self._options = parse_options(config.plugin_config, manager.offers())
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._made: GrammarBackend | None = None
        self._compiling = Lock()
        """One compiles at a time: the steps need the other cores."""

    def prepare(self) -> None:
        """Makes the backend in a thread, if requests can have grammars, before the first does. The
        process ends after it: foreign code that is cut off as it is loaded aborts."""
        if self._offer is not None:
            _in_thread(lambda: self._backend, daemon=False)

    def check(self, spec: GrammarSpec) -> None:
        """RequestError, with the reason, for a grammar that no answer can be held to."""
        offer = self._offer
        if offer is None:
            raise RequestError(
                "grammar: no grammar_backend is mounted; "
                "`pip install rackmount-plugins-xgrammar` brings one"
            )
        if spec.form not in offer.descriptor.forms:
            raise RequestError(
                f"grammar: {offer.name} compiles no {spec.form}; "
                f"it takes {', '.join(offer.descriptor.forms)}"
            )
        backend = self._backend
        try:
            _in_thread(lambda: backend.check(spec)).result(CHECK_S)
        except TimeoutError as error:
            raise RequestError(
                f"grammar: the {spec.form} takes more than {CHECK_S:g} s to compile; "
                "give a simpler one"
            ) from error

    def follow(self, sampling: SamplingRequest, num_prompt_tokens: int) -> "RowGrammar | None":
        """What holds a row to its request's grammar, if it has one. Compiles it in a thread: the
        model computes the prompt meanwhile. What waits for its turn is not compiled any more once
        nobody holds the row's grammar."""
        spec = sampling.params.grammar
        if spec is None:
            return None
        backend, future = self._backend, Future[Grammar]()
        row = RowGrammar(future, sampling, num_prompt_tokens, self.vocab_size, self._compile_s)
        wanted = ref(row)

        def compiled() -> Grammar:
            with self._compiling:
                if wanted() is None:
                    raise RequestError("grammar: its request has ended")
                return backend.compile(spec)

        _in_thread(compiled, future)
        return row

    @property
    def _backend(self) -> GrammarBackend:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> GrammarBackend:
        tokenizer = self._tokenizer()
        if tokenizer is None or self._offer is None:
            raise RequestError("grammar: the model has no tokenizer to say what its tokens mean")
        context = GrammarContext(tokenizer=tokenizer, vocab_size=self.vocab_size)
        return cast(GrammarBackend, instantiate(self._offer, self._options, context))


class RowGrammar:
    """Which tokens the grammar of one row allows. It follows the row's output, wherever that
    begins: after a preemption it reads what is there again."""

    def __init__(
        self,
        grammar: "Future[Grammar]",
        sampling: SamplingRequest,
        num_prompt_tokens: int,
        vocab_size: int,
        compile_s: float,
    ) -> None:
        self._grammar, self._sampling = grammar, sampling
        self._deadline = time.monotonic() + compile_s
        self._num_read = num_prompt_tokens
        """Tokens of the row that were the prompt's, or that the matcher has taken."""
        self._min_position = num_prompt_tokens + sampling.params.min_tokens
        self._matcher: Matcher | None = None
        self._is_lost = False
        self._others = np.full(num_words(vocab_size), -1, np.int32)
        """All tokens that are no stop ids."""
        ban(self._others, sampling.stop_ids)

    def fill_bitmask(self, history: np.ndarray, bitmask: np.ndarray) -> None:
        """Writes which tokens may follow `history`, prompt and output, as `Matcher` does.

        None, where the answer has ended or left the grammar. No stop id below `min_tokens`, unless
        the grammar allows nothing else.
        """
        matcher = self._read(history)
        if matcher is None:
            bitmask.fill(0)
            return
        matcher.fill_bitmask(bitmask)
        if len(history) < self._min_position and (bitmask & self._others).any():
            bitmask &= self._others

    def _read(self, history: np.ndarray) -> Matcher | None:
        """The matcher, behind `history`; None where nothing can follow."""
        if self._is_lost:
            return None
        if self._matcher is None:
            try:
                grammar = self._grammar.result(max(0.0, self._deadline - time.monotonic()))
                self._matcher = grammar.matcher(self._sampling.end_ids)
            except (RackmountError, TimeoutError):  # the request alone fails: it has no token left
                self._is_lost = True
                return None
        tokens = history[self._num_read :].tolist()
        self._num_read = len(history)
        self._is_lost = not all(map(self._matcher.accept, tokens)) or self._matcher.is_terminated
        return None if self._is_lost else self._matcher


def _in_thread(
    work: Callable[[], T], future: "Future[T] | None" = None, *, daemon: bool = True
) -> "Future[T]":
    """What `work` gives, from a thread that holds up no other; nor the process's end, if it is a
    `daemon`."""
    given: Future[T] = Future() if future is None else future

    def run() -> None:
        try:
            given.set_result(work())
        except BaseException as error:
            given.set_exception(error)

    Thread(target=run, name="grammar", daemon=daemon).start()
    return given
