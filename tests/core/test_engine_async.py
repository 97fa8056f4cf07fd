"""An engine that schedules a step while another runs answers as one that waits for each."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.helpers.checkpoints import edit_tensors, tiny_checkpoint
from tests.helpers.engines import (
    EOS,
    assert_idle,
    chain_checkpoint,
    greedy,
    rows,
    spell,
    tiny_engine,
    tokens_of,
)
from tests.helpers.loads import VOCAB, Load, check, loads, watched

from rackmount import Engine, RequestOutput, SamplingParams

PROMPTS = rows(9, 5, 12, 7, 3)


def ahead(folder: Path, **arguments: Any) -> Engine:
    return tiny_engine(folder, async_scheduling=True, **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "qwen3", vocab_size=VOCAB, hidden_size=32
    )[0]


@pytest.mark.timeout(600)  # a failure takes minutes to shrink
@settings(max_examples=40, deadline=None, derandomize=True)
@given(load=loads())
def test_every_load_gives_every_request_the_answer_of_its_run_alone(load: Load, tiny: Path) -> None:
    check(load, tiny, watched(ahead(tiny, dtype="float64", **load.engine)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None)
@given(load=loads())
def test_every_one_of_many_loads_gives_every_request_the_answer_of_its_run_alone(
    load: Load, tiny: Path
) -> None:
    check(load, tiny, watched(ahead(tiny, dtype="float64", **load.engine)))


def test_a_step_is_submitted_before_the_one_ahead_of_it_is_collected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(engine: Engine) -> str:
        calls, executor = [], engine.core.executor
        for name in ("submit", "collect"):
            inner = getattr(executor, name)

            def called(*given: Any, inner: Any = inner, name: str = name) -> Any:
                calls.append(name[0])
                return inner(*given)

            monkeypatch.setattr(executor, name, called)
        engine.generate(PROMPTS[0], greedy(4))
        return "".join(calls)

    assert order(ahead(folder)) == "sscscscc"
    assert order(tiny_engine(folder, async_scheduling=False)) == "scscscsc"
    assert order(tiny_engine(folder)) == "scscscsc"  # nothing is won on a CPU


EVERYTHING = [
    greedy(9, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=1, max_tokens=30, frequency_penalty=1.0, presence_penalty=0.5),
    SamplingParams(seed=2, max_tokens=30, stop_token_ids=list(range(30)), min_tokens=3),
    SamplingParams(seed=3, max_tokens=30, n=3, repetition_penalty=1.3, logprobs=0),
    greedy(30),
]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_answers_equal_those_of_an_engine_that_waits_also_under_preemption(
    policy: str, folder: Path
) -> None:
    answers: list[list[RequestOutput]] = []
    for asynchronous in (False, True):
        engine = tiny_engine(
            folder,
            async_scheduling=asynchronous,
            num_kv_blocks=14,
            scheduling_policy=policy,
            dtype="float64",
        )
        answers.append(engine.generate(PROMPTS, EVERYTHING))
        assert engine.stats.total_preemptions > 0
        assert_idle(engine)
    for ours, theirs in zip(*answers, strict=True):
        assert ours.num_cached_tokens == theirs.num_cached_tokens
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert mine.token_ids == other.token_ids
            assert (mine.finish_reason, mine.stop_reason) == (
                other.finish_reason,
                other.stop_reason,
            )
            for entry, expected in zip(mine.logprobs or (), other.logprobs or (), strict=True):
                assert entry.token_id == expected.token_id
                assert entry.logprob == pytest.approx(expected.logprob)
        for entry, expected in zip(
            (ours.prompt_logprobs or [])[1:], (theirs.prompt_logprobs or [])[1:], strict=True
        ):
            assert entry is not None and expected is not None
            assert entry.logprob == pytest.approx(expected.logprob)


def test_what_is_in_flight_when_a_text_ends_is_no_part_of_it(tmp_path: Path) -> None:
    chain = spell("123", start="0", end=EOS)
    engine = ahead(chain_checkpoint(tmp_path, chain))
    prompts = ["0", "A", "0", "A"]
    params = [
        greedy(20, ignore_eos=False),
        greedy(20, stop="EFG"),
        greedy(20, stop_token_ids=[ord("2")], logprobs=1),
        greedy(5),
    ]
    outputs = engine.generate(prompts, params)
    assert [output.text for output in outputs] == ["123", "BCD", "1", "BCDEF"]
    assert outputs[2].outputs[0].logprobs is not None
    assert len(outputs[2].outputs[0].logprobs) == len(outputs[2].token_ids) == 2
    streamed = ["", "", "", ""]
    for chunk in engine.stream(prompts, params):
        streamed[chunk.prompt_index] += chunk.text
    assert streamed == [output.text for output in outputs]
    assert_idle(engine)


def test_logits_of_nan_end_their_request_alone_and_once(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors[name][7].fill_(torch.nan))
    engine = ahead(folder)
    good = [[1, 2, 3], [4, 5, 6, 8]]
    alone = [tokens_of(engine, [prompt], greedy(9))[0] for prompt in good]
    chunks = list(engine.stream([good[0], [1, 7, 2], good[1]], greedy(9)))
    assert [(c.token_ids, c.finish_reason) for c in chunks if c.prompt_index == 1] == [
        ([], "error")
    ]
    tokens = [[t for c in chunks if c.prompt_index == i for t in c.token_ids] for i in (0, 2)]
    assert tokens == alone
    assert_idle(engine)


class BrokenError(Exception):
    """Any failure of the model."""


def breaks_at(engine: Engine, *numbers: int, error: BaseException) -> list[int]:
    """Lets the program raise at these steps from now, and counts all."""
    program: Any = engine.core.executor._program  # type: ignore[attr-defined]
    answer, count = program.answer, [0]

    def counted(plan: Any) -> Any:
        count[0] += 1
        if count[0] in numbers:
            raise error
        return answer(plan)

    program.answer = counted
    return count


@pytest.mark.parametrize("numbers", [(3,), (3, 4), (4,)], ids=str)
def test_a_step_that_raises_ends_what_it_ran_and_what_waits_goes_on(
    numbers: tuple[int, ...], folder: Path
) -> None:
    engine = ahead(folder, max_num_seqs=2)
    expected = tokens_of(engine, PROMPTS, greedy(9))
    streams = [engine.stream(prompt, greedy(9)) for prompt in PROMPTS]
    breaks_at(engine, *numbers, error=BrokenError())
    with pytest.raises(BrokenError):
        list(streams[0])
    ends = [list(stream) for stream in streams[1:]]
    assert ends[0][-1].finish_reason == "error"
    tokens = [[t for chunk in chunks for t in chunk.token_ids] for chunks in ends]
    assert tokens[1:] == expected[2:]
    assert tokens[0] == expected[1][: len(tokens[0])]
    assert_idle(engine)
    assert tokens_of(engine, PROMPTS, greedy(9)) == expected


def in_the_program(engine: Engine) -> None:
    breaks_at(engine, 3, error=KeyboardInterrupt())


def in_a_wait(engine: Engine) -> None:
    executor = engine.core.executor
    collect, count = executor.collect, [0]

    def counted() -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return collect()

    executor.collect = counted  # type: ignore[method-assign]


def in_the_scheduler(engine: Engine) -> None:
    update, count = engine.core.scheduler.update, [0]

    def counted(*given: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return update(*given)

    engine.core.scheduler.update = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("where", [in_the_program, in_a_wait, in_the_scheduler])
def test_after_an_interrupt_no_answer_in_flight_is_taken_for_another(
    where: Callable[[Engine], None], folder: Path
) -> None:
    engine = ahead(folder)
    expected = tokens_of(engine, PROMPTS, greedy(9))
    other = engine.stream(PROMPTS[0], greedy(9))
    where(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1:], greedy(9))
    assert list(other)[-1].finish_reason == "error"
    assert_idle(engine)
    assert tokens_of(engine, PROMPTS, greedy(9)) == expected
    assert_idle(engine)


def test_requests_may_be_aborted_and_prefixes_forgotten_while_a_step_runs(folder: Path) -> None:
    engine = ahead(folder)
    expected = tokens_of(engine, PROMPTS, greedy(9))
    streams = [engine.stream(prompt, greedy(9)) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    streams[0].close()
    assert engine.stats.kv_usage > 0
    engine.reset_prefix_cache()
    tokens = [[t for chunk in stream for t in chunk.token_ids] for stream in streams]
    assert tokens == [[], *(each[1:] for each in expected[1:])]
    last = engine.stream(PROMPTS[0], greedy(9))
    next(last)
    last.close()
    assert tokens_of(engine, PROMPTS, greedy(9)) == expected  # with a step of nobody in flight
    assert_idle(engine)


def test_an_engine_may_be_closed_while_a_step_runs(folder: Path) -> None:
    engine = ahead(folder)
    stream = engine.stream(PROMPTS[0], greedy(9))
    next(stream)
    worker = weakref.ref(engine.core.executor._program._worker)  # type: ignore[attr-defined]
    engine.close()
    gc.collect()
    assert worker() is None
    assert [chunk.finish_reason for chunk in stream] == ["abort"]
