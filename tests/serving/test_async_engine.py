"""An engine for coroutines: `Engine`'s answers, and what becomes of those that nobody awaits."""

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import EOS, chain_checkpoint, greedy, spell, tiny_engine
from tests.helpers.executors import belongings
from tests.helpers.null_executor import RAISES, TOKEN, null_plugin

from rackmount import AsyncEngine, Engine, EngineDead, RequestOutput, SamplingParams, TextChunk
from rackmount.serving import process
from rackmount.text.stream import TextStream
from rackmount_registry.errors import (
    ConfigError,
    PluginError,
    RackmountError,
    RequestError,
    SelectionError,
)

SMALL: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 8}

CASES = {
    "plain": greedy(9),
    "stop string": greedy(12, stop="DEFGHIJ"),
    "stop string kept": greedy(12, stop=["DEX", "HIJ"], include_stop_str_in_output=True),
    "end of sequence": greedy(12, ignore_eos=False, stop="!"),
    "half a character": greedy(2),
    "no text": greedy(3, detokenize=False),
    "logprobs": greedy(4, logprobs=2, prompt_logprobs=1),
    "n": SamplingParams(n=3, seed=4, temperature=30.0, max_tokens=15, logprobs=2, stop=["k", "Q"]),
}


@dataclass
class Served:
    """An engine, and the loop that it lives on."""

    engine: AsyncEngine
    run: Callable[[Awaitable[Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ "A" is answered by "BCDE...", "(" by characters of two to four bytes, "0" by half of one."""
    answers = spell("ď😀한!", start="(", end=EOS) | spell("1\u20ac", start="0", end=ord("2"))
    return chain_checkpoint(tmp_path_factory.mktemp("chain"), answers)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        engine = runner.run(AsyncEngine.start(folder, **SMALL))
        yield Served(engine, runner.run)
        runner.run(engine.close())


@pytest.fixture
def null(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Awaitable[AsyncEngine]]:
    """Starts an engine without a model."""
    monkeypatch.syspath_prepend(null_plugin(tmp_path))
    return lambda: AsyncEngine.start(folder, executor="null")


async def await_idle(engine: AsyncEngine) -> None:
    """Until the core has nothing to do, and holds no block."""
    deadline = time.monotonic() + 10
    while (it := engine.stats).num_running or it.num_waiting or it.kv_usage:
        assert time.monotonic() < deadline, it
        await asyncio.sleep(0.05)
    assert not engine.num_unfinished and not engine.num_waiting


def joined(chunks: list[TextChunk], index: int) -> dict[str, Any]:
    own = [chunk for chunk in chunks if chunk.index == index]
    assert all(chunk.finish_reason is None for chunk in own[:-1])
    return {
        "text": "".join(chunk.text for chunk in own),
        "token_ids": [token_id for chunk in own for token_id in chunk.token_ids],
        "logprobs": [entry for chunk in own for entry in chunk.logprobs or ()],
        "finish_reason": own[-1].finish_reason,
        "stop_reason": own[-1].stop_reason,
    }


def test_its_steps_mix_prompts_with_decoding_unless_told_otherwise(folder: Path) -> None:
    async def mixed(**given: bool | None) -> bool | None:
        async with await AsyncEngine.start(folder, **SMALL | given) as engine:
            return engine.config.enable_mixed_steps

    assert asyncio.run(mixed(enable_mixed_steps=None)) is True
    assert asyncio.run(mixed(enable_mixed_steps=False)) is False
    with Engine(folder, **SMALL) as engine:
        assert not engine.core.limits.enable_mixed_steps
    with Engine(folder, scheduling_policy="priority", **SMALL) as engine:
        assert engine.core.limits.enable_mixed_steps


def test_answers_are_those_of_the_engine_whole_and_in_chunks(folder: Path, served: Served) -> None:
    prompts: list[Any] = ["A", "(", "0", [1, 2]]
    with tiny_engine(folder) as plain:
        expected = {name: plain.generate(prompts, params) for name, params in CASES.items()}

    async def check() -> None:
        asked = [(name, at) for name in CASES for at in range(len(prompts))]
        whole: list[RequestOutput] = await asyncio.gather(
            *(served.engine.submit(prompts[at], CASES[name]).output() for name, at in asked)
        )
        for (name, at), output in zip(asked, whole, strict=True):
            wanted = expected[name][at]
            output.num_cached_tokens = wanted.num_cached_tokens
            assert output == wanted, name
            chunks = [chunk async for chunk in served.engine.submit(prompts[at], CASES[name])]
            for answer in wanted.outputs:
                assert joined(chunks, answer.index) == {
                    "text": answer.text,
                    "token_ids": answer.token_ids,
                    "logprobs": answer.logprobs or [],
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                }
        await await_idle(served.engine)

    served.run(check())


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "message"),
    [
        ([], greedy(), RequestError, "has no token"),
        ([1] * 256, greedy(), RequestError, "max_model_len=256"),
        ([260], greedy(), RequestError, "legal ids are 0 to 259"),
        ("A", greedy(stop_token_ids=[260]), ConfigError, "stop_token_ids holds id 260"),
        ("A", greedy(top_k=2**70), RequestError, "beyond 64 bits"),
        ("A", {"temperature": 0}, TypeError, "params of type dict"),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(
    served: Served, prompt: Any, params: Any, kind: type[Exception], message: str
) -> None:
    async def submit() -> None:
        with pytest.raises(kind, match=message):
            served.engine.submit(prompt, params)
        assert not served.engine.num_unfinished

    served.run(submit())


def test_a_prompt_that_can_never_fit_is_refused_at_once(folder: Path) -> None:
    async def check() -> None:
        async with await AsyncEngine.start(folder, **SMALL | {"num_kv_blocks": 2}) as engine:
            with pytest.raises(RequestError, match="can never fit the KV cache; at most 8 do"):
                engine.submit([1] * 9, greedy())
            assert (await engine.submit([1] * 7, greedy(2)).output()).token_ids == [2, 3]

    asyncio.run(check())


@pytest.mark.parametrize("how", ["closed", "dropped", "cancelled"])
def test_an_answer_that_nobody_awaits_is_aborted_and_its_neighbour_is_not(
    served: Served, how: str
) -> None:
    engine = served.engine

    async def check() -> None:
        neighbour = engine.submit("A", greedy(40))
        answer = engine.submit("A", greedy(200, n=2))
        if how == "cancelled":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer.output(), 0.01)
        else:
            await anext(answer)
        sequences = answer.sequences
        if how == "closed":
            await answer.aclose()
            assert [chunk async for chunk in answer] == []
        elif how == "dropped":
            del answer
            gc.collect()
            await asyncio.sleep(0)
        assert [each.finish_reason for each in sequences] == ["abort", "abort"]
        assert engine.num_unfinished <= 1
        assert (await neighbour.output()).token_ids == list(range(66, 106))
        await await_idle(engine)
        assert engine.stats.total_sampled_tokens < 1500

    served.run(check())


def test_a_reader_that_never_reads_holds_up_nobody_and_gets_all_at_once(served: Served) -> None:
    async def check() -> None:
        slow = served.engine.submit("A", greedy(150))
        expected = (await served.engine.submit("A", greedy(160)).output()).token_ids[:150]
        await await_idle(served.engine)
        (chunk,) = [chunk async for chunk in slow]
        assert chunk.token_ids == expected
        assert chunk.text == slow.sequences[0].text
        assert chunk.finish_reason == "length"

    served.run(check())


def test_times_are_measured_here_and_durations_in_the_core(served: Served) -> None:
    async def check() -> None:
        begin = time.monotonic()
        answer = served.engine.submit("A", greedy(5))
        assert (served.engine.num_waiting, served.engine.num_waiting_tokens) == (1, 1)
        await answer.output()
        (it,) = answer.sequences
        assert it.first_token_at is not None and it.last_token_at is not None
        assert begin <= it.arrived_at <= it.first_token_at < it.last_token_at <= time.monotonic()
        assert it.queue_s is not None and it.prefill_s is not None
        assert it.queue_s >= 0 and it.prefill_s > 0
        assert it.queue_s + it.prefill_s <= it.first_token_at - it.arrived_at

    served.run(check())


def test_a_last_token_that_cannot_be_decoded_ends_its_stream(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def check() -> None:
        answer = served.engine.submit("A", greedy(1))
        with monkeypatch.context() as patch:
            patch.setattr(TextStream, "finish", fail)
            chunk = await asyncio.wait_for(anext(answer), 10)
        assert chunk.finish_reason == "error"
        await await_idle(served.engine)

    served.run(check())


def test_a_grammar_backend_is_made_before_a_request_needs_it(served: Served) -> None:
    async def check() -> None:
        deadline = time.monotonic() + 20
        while served.engine._intake.grammars._made is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    served.run(check())


@pytest.mark.parametrize("broken", ["bind", "start"])
def test_a_process_that_cannot_start_leaves_no_folder_and_no_line(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 40 if broken == "bind" else "short")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if broken == "start":
        monkeypatch.setattr(process, "_start", lambda *_: (_ for _ in ()).throw(OSError("no")))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RackmountError if broken == "bind" else OSError):
        process.CoreProcess()
    gc.collect()
    assert list(folder.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_the_prefix_cache_can_be_reset_and_the_parts_are_told(served: Served) -> None:
    async def check() -> None:
        engine = served.engine
        await engine.submit([7] * 9, greedy(1)).output()
        again = await engine.submit([7] * 9, greedy(1)).output()
        assert again.num_cached_tokens == 8
        assert await engine.reset_prefix_cache() > 0
        assert await engine.reset_prefix_cache() == 0
        description = json.loads(json.dumps(engine.description))
        assert {"attention_backend", "executor"} <= {it["kind"] for it in description["parts"]}
        assert all(it["why"] for it in description["parts"])
        assert "KV cache: 256 tokens (64 blocks of 4)" in description["report"]
        assert engine.encode("AB") == [65, 66]
        assert (engine.model_info.max_model_len, engine.model_info.vocab_size) == (256, 260)

    served.run(check())


def test_the_load_of_experts_is_told_amid_answers(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe")
    with tiny_engine(folder) as engine:
        expected = engine.generate([[5, 6, 7]], greedy(12))[0].token_ids
        load = engine.expert_load()

    async def check() -> None:
        async with await AsyncEngine.start(folder, **SMALL) as engine:
            assert engine.description["expert_layers"] == [each.layer for each in load]
            answer = engine.submit([5, 6, 7], greedy(12))
            told = await asyncio.gather(*(engine.expert_load() for _ in range(3)))
            assert (await answer.output()).token_ids == expected
            assert all(len(each) == len(load) for each in told)
            found = await engine.expert_load()
            assert [each.tokens.tolist() for each in found] == [
                each.tokens.tolist() for each in load
            ]
        with pytest.raises(EngineDead):
            await engine.expert_load()

    asyncio.run(check())


def test_signals_are_the_front_ends_business(served: Served) -> None:
    async def check() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(served.engine.description["processes"]["core"], number)
        assert (await served.engine.submit("A", greedy(2)).output()).text == "BC"

    served.run(check())


def test_closing_drains_for_so_long_and_aborts_the_rest(folder: Path) -> None:
    before = belongings()

    async def check() -> None:
        engine = await AsyncEngine.start(folder, **SMALL)
        short = asyncio.create_task(engine.submit("A", greedy(30)).output())
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close(drain_s=20))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="the engine is closing"):
            engine.submit("A", greedy())
        assert (await short).outputs[0].finish_reason == "length"
        await closing
        assert not engine.is_alive and engine.failure == "the engine is closed"
        await engine.close()
        engine = await AsyncEngine.start(folder, **SMALL)
        answer = engine.submit("A", greedy(250))
        await engine.close()
        chunks = [chunk async for chunk in answer]
        assert chunks[-1].finish_reason == "abort"
        with pytest.raises(EngineDead, match="the engine is closed"):
            engine.submit("A", greedy())

    asyncio.run(check())
    assert belongings() == before


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"max_model_lenn": 3}, TypeError, "did you mean 'max_model_len'"),
        ({"max_model_len": 10**6}, ConfigError, "choose at most 256"),
        ({"backend": "tritn"}, SelectionError, "did you mean 'triton'"),
    ],
)
def test_what_cannot_start_is_told_as_the_engine_tells_it(
    folder: Path, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as plain:
        Engine(folder, **arguments)
    before = belongings()
    with pytest.raises(kind, match=message) as caught:
        asyncio.run(AsyncEngine.start(folder, **arguments))
    assert str(caught.value) == str(plain.value)
    assert type(caught.value) is type(plain.value)
    assert belongings() == before


def test_a_tokenizer_that_is_broken_ends_the_start_and_the_process(tmp_path: Path) -> None:
    folder = chain_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    before = belongings()
    with pytest.raises(Exception, match="Expecting property name"):
        asyncio.run(AsyncEngine.start(folder))
    assert belongings() == before


def test_a_plugin_brings_an_executor_and_a_step_that_raises_ends_its_requests_alone(
    null: Callable[[], Awaitable[AsyncEngine]],
) -> None:
    async def check() -> None:
        async with await null() as engine:
            output = await engine.submit("A", greedy(50)).output()
            assert output.token_ids == [TOKEN] * 50
            failed = await engine.submit([RAISES], greedy(5, n=2)).output()
            assert [each.finish_reason for each in failed.outputs] == ["error", "error"]
            assert (await engine.submit("A", greedy(5)).output()).text == "xxxxx"
            await await_idle(engine)

    asyncio.run(check())


def test_plugins_that_the_core_cannot_find_are_refused(
    folder: Path, null: Callable[[], Awaitable[AsyncEngine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rackmount_registry.plugins import PluginManager

    manager = PluginManager.discover()
    monkeypatch.setattr(sys, "path", sys.path[1:])
    with pytest.raises(PluginError, match="null: the driver has version 0"):
        asyncio.run(AsyncEngine.start(folder, manager=manager))
