"""Interrupts and garbage at any moment: nothing is lost in silence, and the engine lives."""

import gc
import itertools
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    assert_idle,
    chain_checkpoint,
    greedy,
    rows,
    tiny_engine,
    tokens_of,
)

from rackmount import Engine
from rackmount.engine import sequence
from rackmount.text.stream import TextStream

PROMPTS = rows(9, 5, 12, 7, 3)


class Interrupt(BaseException):
    """What a signal raises between any two instructions."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")[0]


@pytest.fixture
def alarm() -> Iterator[Any]:
    """Sets when the next Interrupt comes, in seconds; 0 for none."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(engine: Engine, alarm: Any, after: float) -> tuple[bool, list[int], str | None]:
    """Whether a `generate` was interrupted, and the tokens and end of a stream open beside it.

    An interrupt within torch's own bookkeeping of its modes may come out as a RuntimeError of that
    step or the next: a loud end, too.
    """
    stream = engine.stream(PROMPTS[0], greedy(9))
    try:
        tokens = [*next(stream).token_ids]
    except RuntimeError:
        return True, [], "error"
    hit = False
    try:
        alarm(after)
        engine.generate(PROMPTS, greedy(9))
    except (Interrupt, RuntimeError):
        hit = True
    finally:
        alarm(0)
    end = None
    try:
        for chunk in stream:
            tokens += chunk.token_ids
            end = chunk.finish_reason
    except RuntimeError:
        end = "error"
    return hit, tokens, end


# Python itself drops an interrupt that comes within a callback of its garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize(
    "num_hits", [pytest.param(60, id="few"), pytest.param(1500, id="many", marks=pytest.mark.slow)]
)
def test_an_interrupt_at_any_moment_costs_no_token_in_silence(
    folder: Path, alarm: Any, num_hits: int, ahead: bool
) -> None:
    engine = tiny_engine(folder, max_num_seqs=4, async_scheduling=ahead)
    expected = tokens_of(engine, PROMPTS, greedy(9))
    moments = random.Random(1)
    hits = 0
    while hits < num_hits:
        hit, tokens, end = interrupted(engine, alarm, moments.uniform(0.0005, 0.02))
        hits += hit
        assert end == "error" or tokens == expected[0], f"ended as {end} with {len(tokens)} tokens"
        assert_idle(engine)
    assert tokens_of(engine, PROMPTS, greedy(9)) == expected


def test_an_interrupt_at_any_line_of_a_sequence_costs_no_token_in_silence(folder: Path) -> None:
    engine = tiny_engine(folder)
    expected = tokens_of(engine, PROMPTS[:1], greedy(2))[0]
    left = 0

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != sequence.__file__:
            return None
        left -= what == "line"
        if left == 0 and what == "line":
            raise Interrupt
        return trace

    for number in itertools.count(1):
        stream = engine.stream(PROMPTS[0], greedy(2))
        tokens, end, is_hit = [*next(stream).token_ids], None, False
        before, left = sys.gettrace(), number
        sys.settrace(trace)
        try:
            engine.generate(PROMPTS[1], greedy(2))
        except Interrupt:
            is_hit = True
        finally:
            sys.settrace(before)
        for chunk in stream:
            tokens += chunk.token_ids
            end = chunk.finish_reason
        assert end == "error" or tokens == expected, f"line {number}: {end}, {len(tokens)} tokens"
        assert_idle(engine)
        if not is_hit:
            break
    assert number > 50


@pytest.mark.parametrize("where", ["schedule", "update"])
def test_an_interrupt_inside_the_scheduler_ends_all_and_starts_anew(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(folder)
    expected = tokens_of(engine, PROMPTS, greedy(9))
    other = engine.stream(PROMPTS[0], greedy(9))
    next(other)

    def interrupt(*_: object) -> None:
        raise Interrupt

    inner = {"schedule": "_grow", "update": "_publish"}[where]
    monkeypatch.setattr(engine.core.scheduler, inner, interrupt)
    with pytest.raises(Interrupt):
        engine.generate(PROMPTS[1], greedy(9))
    assert [chunk.finish_reason for chunk in other] == ["error"]
    assert_idle(engine)
    assert tokens_of(engine, PROMPTS, greedy(9)) == expected


@pytest.mark.parametrize("error", [Interrupt, ZeroDivisionError])
@pytest.mark.parametrize("where", ["push", "finish"])
def test_what_is_raised_while_the_last_token_is_decoded_ends_its_stream(
    where: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(chain_checkpoint(tmp_path))
    stream = engine.stream("A", greedy(2))
    assert next(stream).text == "B"

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(TextStream, where, fail)
        engine.generate("A", greedy(1))
    assert [chunk.finish_reason for chunk in stream] == ["error"]
    assert_idle(engine)


def test_the_counters_go_on_where_the_core_starts_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(folder)
    tokens_of(engine, PROMPTS, greedy(9))
    before = engine.stats
    assert before.total_sampled_tokens == 9 * len(PROMPTS)

    def interrupt(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(engine.core.scheduler, "_grow", interrupt)
    with pytest.raises(Interrupt):
        engine.generate(PROMPTS[1], greedy(9))
    assert_idle(engine)
    assert engine.stats.total_sampled_tokens == before.total_sampled_tokens
    tokens_of(engine, PROMPTS[:1], greedy(2))
    assert engine.stats.total_sampled_tokens == before.total_sampled_tokens + 2


def test_a_stream_collected_inside_the_scheduler_ends_before_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(folder)
    expected = tokens_of(engine, PROMPTS, greedy(9))
    garbage: list[Any] = [engine.stream(PROMPTS[1], greedy(9))]
    next(garbage[0])
    garbage.append(garbage)
    scheduler = engine.core.scheduler
    grow = scheduler._grow

    def collect_and_grow(*given: np.ndarray) -> Any:
        monkeypatch.undo()
        gc.collect()
        return grow(*given)

    gc.disable()
    try:
        del garbage
        monkeypatch.setattr(scheduler, "_grow", collect_and_grow)
        assert tokens_of(engine, [PROMPTS[2]], greedy(9)) == [expected[2]]
    finally:
        gc.enable()
    assert_idle(engine)


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = tiny_engine(folder)
    stream = engine.stream(PROMPTS[0], greedy(9))
    next(stream)
    engine.close()
    for use in (lambda: engine.generate([1], greedy(1)), lambda: engine.stats):
        with pytest.raises(Exception, match="the engine is closed"):
            use()
    assert [chunk.finish_reason for chunk in stream] == ["abort"]
    engine.close()
