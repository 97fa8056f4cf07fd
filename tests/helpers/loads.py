"""Random loads of an engine, and what must hold of the answers to each."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from tests.helpers.engines import assert_idle, tiny_engine
from tests.helpers.scheduling import assert_pool_conserved

from rackmount import Engine, SamplingParams
from rackmount.engine.sequence import Sequence
from rackmount.sampling.request import TokenLogprobs
from rackmount.scheduling.plan import StepPlan

VOCAB = 23
MAX_LEN = 40
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Ask:
    """A request that comes before step `step` and, unless it has ended, goes after `abort_at`."""

    step: int
    abort_at: int | None
    prompt: list[int]
    params: SamplingParams
    priority: int
    salt: str | None


@dataclass(frozen=True)
class Load:
    engine: dict[str, Any]
    asks: list[Ask]
    resets: frozenset[int]
    """Steps after which the prefix cache is reset."""


ids = st.integers(0, VOCAB - 1)
samplings = st.one_of(
    st.just({"temperature": 0.0}),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.3, 1.0, 4.0]), "seed": st.integers(0, 3)},
        optional={
            "top_k": st.integers(1, VOCAB),
            "top_p": st.floats(0.1, 1),
            "min_p": st.floats(0, 0.5),
        },
    ),
)
options = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 30), "ignore_eos": st.booleans()},
    optional={
        "n": st.just(2),
        "repetition_penalty": st.floats(0.7, 2),
        "presence_penalty": st.floats(-1, 2),
        "frequency_penalty": st.floats(-1, 2),
        "logit_bias": st.dictionaries(ids, st.floats(-9, 9), max_size=3),
        "allowed_token_ids": st.lists(ids, min_size=9, max_size=20),
        "stop_token_ids": st.lists(ids, max_size=2),
        "min_tokens": st.integers(0, 4),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
    },
)


@st.composite
def all_params(draw: st.DrawFn) -> SamplingParams:
    given = draw(options)
    given["min_tokens"] = min(given.get("min_tokens", 0), given["max_tokens"])
    return SamplingParams(**draw(samplings), **given)


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of an engine with little room."""
    block_size, max_model_len = draw(st.integers(1, 6)), draw(st.integers(4, MAX_LEN))
    barely = -(-(max_model_len - 1) // block_size)
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_kv_blocks": draw(st.integers(max(1, barely - 2), 2 * barely)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(1, 50)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, block_size])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_prefix_caching": draw(st.booleans()),
        "enable_mixed_steps": draw(st.booleans()),
    }


@st.composite
def loads(draw: st.DrawFn, of: st.SearchStrategy[dict[str, Any]] | None = None) -> Load:
    """What is asked of an engine, any or one `of` these."""
    engine = draw(engines() if of is None else of)
    longest = min(engine["max_model_len"] - 1, engine["num_kv_blocks"] * engine["block_size"])
    stem = draw(st.lists(ids, min_size=MAX_LEN, max_size=MAX_LEN))
    asks = []
    for _ in range(draw(st.integers(1, 7))):
        length = draw(st.integers(1, longest))
        num_shared = draw(st.integers(0, length))
        own = draw(st.lists(ids, min_size=length - num_shared, max_size=length - num_shared))
        step = draw(st.integers(0, 15))
        asks.append(
            Ask(
                step=step,
                abort_at=draw(st.none() | st.none() | st.integers(step, step + 15)),
                prompt=stem[:num_shared] + own,
                params=draw(all_params()),
                priority=draw(st.integers(-1, 1)),
                salt=draw(st.sampled_from([None, None, "a"])),
            )
        )
    return Load(engine, asks, draw(st.frozensets(st.integers(0, 30), max_size=2)))


@cache
def alone_engine(folder: Path) -> Engine:
    """Answers one request at a time, its prompt at once, from a pool that never ends."""
    return tiny_engine(folder, dtype="float64", enable_prefix_caching=False)


def alone(folder: Path, ask: Ask, engine: Engine) -> list[Sequence]:
    """What `ask` gets on its own, within the lengths that `engine` allows."""
    num_kv_tokens = engine.rack.block_size * engine.core.num_kv_blocks
    room = min(engine.rack.max_model_len, num_kv_tokens + 1) - len(ask.prompt)
    max_tokens = min(ask.params.max_tokens or room, room)
    min_tokens = min(ask.params.min_tokens, max_tokens)
    reference = alone_engine(folder)
    params = replace(ask.params, max_tokens=max_tokens, min_tokens=min_tokens)
    stream = reference.stream(ask.prompt, params)
    sequences = list(reference._sequences.values())
    assert len(list(stream)) >= params.n
    return sequences


def watched(engine: Engine) -> Engine:
    """Holds every step of `engine` against its limits."""
    submit, config = engine.core.executor.submit, engine.config

    def checked(plan: StepPlan) -> None:
        assert plan.num_tokens.sum() == plan.total_num_tokens <= config.max_num_batched_tokens
        assert 0 < len(plan.rows) == len(set(plan.rows.tolist())) <= config.max_num_seqs
        submit(plan)

    engine.core.executor.submit = checked  # type: ignore[method-assign]
    return engine


def run(engine: Engine, load: Load) -> list[tuple[Ask, list[Sequence], bool]]:
    """Each request with its sequences and whether it was aborted. Idle at the end."""
    running: list[tuple[Ask, list[Sequence], Any]] = []
    aborted: set[int] = set()
    last = max(ask.step for ask in load.asks)
    # Each step computes a token of the first in order; a preemption may undo a whole sequence.
    bound = last + sum(3 * MAX_LEN * ask.params.n for ask in load.asks)
    for step in range(bound):
        for ask in load.asks:
            if ask.step == step:
                before = set(engine._sequences)
                stream: Any = engine.stream(
                    ask.prompt, ask.params, priority=ask.priority, cache_salt=ask.salt
                )
                new = [each for name, each in engine._sequences.items() if name not in before]
                running.append((ask, new, stream))
        engine._step()
        for index, (ask, sequences, stream) in enumerate(running):
            if ask.abort_at == step and any(each.finish_reason is None for each in sequences):
                stream.close()
                aborted.add(index)
        if step in load.resets:
            engine.reset_prefix_cache()
        if step >= last and not engine._sequences:
            return [(ask, each, i in aborted) for i, (ask, each, _) in enumerate(running)]
    raise AssertionError(f"{engine.stats} after {bound} steps")


def assert_same(ours: list[Any] | None, alone: list[Any] | None) -> None:
    """The same entries of log-probabilities, to the rounding of float64."""
    assert (ours is None) == (alone is None)
    for mine, other in zip(ours or (), alone or (), strict=True):
        assert (mine is None) == (other is None)
        if isinstance(mine, TokenLogprobs):
            assert (mine.token_id, mine.rank) == (other.token_id, other.rank)
            assert mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
            assert mine.top == pytest.approx(other.top, abs=TOLERANCE)


def check(load: Load, folder: Path, engine: Engine) -> None:
    """Every request of `load`, on an idle `engine`, is answered as alone."""
    done = run(engine, load)
    assert_idle(engine)
    assert_pool_conserved(engine.core.scheduler.pool)
    assert len(done) == len(load.asks)
    for ask, sequences, aborted in done:
        assert len(sequences) == ask.params.n
        for ours, expected in zip(sequences, alone(folder, ask, engine), strict=True):
            num, cut = len(ours.token_ids), aborted and ours.finish_reason == "abort"
            assert ours.token_ids == expected.token_ids[: num if cut else None]
            logprobs = expected.logprobs
            assert_same(ours.logprobs, logprobs and logprobs[:num])
            if not cut:
                assert ours.finish_reason == expected.finish_reason
                assert ours.stop_reason == expected.stop_reason
                assert_same(ours.prompt_logprobs, expected.prompt_logprobs)
