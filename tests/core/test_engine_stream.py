"""Streams: the same answers piece by piece, and what happens when one is closed."""

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
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

from rackmount import Engine, SamplingParams, TextChunk
from rackmount.execution.messages import StepResult

BROKEN = "\ufffd"

CASES = {
    "plain": greedy(9),
    "stop string": greedy(12, stop="DEFGHIJ"),
    "stop string kept": greedy(12, stop=["DEX", "HIJ"], include_stop_str_in_output=True),
    "end of sequence": greedy(12, ignore_eos=False),
    "end of sequence and stop string": greedy(12, ignore_eos=False, stop="!"),
    "half a character": greedy(2),
    "half of another character": greedy(5),
    "no text": greedy(3, detokenize=False),
    "n": SamplingParams(n=3, seed=4, temperature=30.0, max_tokens=15, logprobs=2, stop=["k", "Q"]),
}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """ "A" is answered by "BCDE...", "(" by characters of two to four bytes, "0" by half of one."""
    answers = spell("ď😀한!", start="(", end=EOS) | spell("1\u20ac", start="0", end=ord("2"))
    return tiny_engine(chain_checkpoint(tmp_path_factory.mktemp("chain"), answers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")[0]


def joined(chunks: Iterable[TextChunk]) -> dict[tuple[int, int], dict[str, Any]]:
    """By prompt and answer: everything that its chunks give, put together."""
    answers: dict[tuple[int, int], dict[str, Any]] = defaultdict(
        lambda: {"text": "", "token_ids": [], "logprobs": []}
    )
    for chunk in chunks:
        answer = answers[chunk.prompt_index, chunk.index]
        assert "finish_reason" not in answer, "a chunk after the end"
        answer["text"] += chunk.text
        answer["token_ids"] += chunk.token_ids
        answer["logprobs"] += chunk.logprobs or []
        if chunk.finish_reason is not None:
            answer |= {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
    return dict(answers)


@pytest.mark.parametrize("case", CASES)
def test_chunks_together_are_what_generate_gives(chain: Engine, case: str) -> None:
    params = CASES[case]
    prompts: Any = ["A", "(", "0", [1, 2]]
    expected = {
        (index, answer.index): {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "logprobs": answer.logprobs or [],
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        for index, output in enumerate(chain.generate(prompts, params))
        for answer in output.outputs
    }
    assert joined(chain.stream(prompts, params)) == expected
    assert len(expected) == 4 * params.n
    assert_idle(chain)


def test_a_stop_string_across_tokens_leaks_nothing(chain: Engine) -> None:
    chunks = list(chain.stream("A", greedy(12, stop="DEFGHIJ")))
    assert [chunk.text for chunk in chunks] == ["B", "C", *[""] * 7]
    assert chunks[-1].stop_reason == "DEFGHIJ"


def test_what_only_looked_like_a_stop_string_comes_late(chain: Engine) -> None:
    chunks = [chunk.text for chunk in chain.stream("A", greedy(5, stop="DEX"))]
    assert chunks == ["B", "C", "", "", "DEF"]


def test_a_character_comes_whole(chain: Engine) -> None:
    chunks = [chunk.text for chunk in chain.stream("(", greedy(12, ignore_eos=False))]
    assert [text for text in chunks if text] == ["ď", "😀", "한", "!"]


def test_a_broken_character_comes_once_at_the_end(chain: Engine) -> None:
    chunks = [chunk.text for chunk in chain.stream("0", greedy(3))]
    assert chunks == ["1", "", BROKEN]


def test_a_stream_takes_one_step_a_chunk(chain: Engine) -> None:
    before = chain.stats.total_sampled_tokens
    stream = chain.stream("A", greedy(9))
    assert [next(stream).text for _ in range(3)] == ["B", "C", "D"]
    assert chain.stats.total_sampled_tokens == before + 3
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert_idle(chain)


@pytest.mark.parametrize("num_read", [0, 1, 5])
@pytest.mark.parametrize("by", ["close", "forgetting"])
def test_closing_a_stream_early_ends_all_its_answers_and_frees_their_blocks(
    folder: Path, num_read: int, by: str
) -> None:
    engine = tiny_engine(folder)
    stream: Any = engine.stream(rows(9, 5), greedy(30, n=2))
    for _ in range(num_read):
        next(stream)
    assert len(engine._sequences) == 4
    if by == "close":
        stream.close()
    else:
        del stream
    assert_idle(engine)
    (prompt,) = rows(7, seed=1)
    sampled = engine.stats.total_sampled_tokens
    fresh = tiny_engine(folder).generate(prompt, greedy(9))[0].token_ids
    assert engine.generate(prompt, greedy(9))[0].token_ids == fresh
    assert engine.stats.total_sampled_tokens == sampled + 9  # no ghost decodes along


def test_closing_one_stream_leaves_the_others_their_tokens(folder: Path) -> None:
    engine = tiny_engine(folder)
    prompts = rows(9, 5, 12)
    expected = tokens_of(engine, prompts, greedy(15))
    streams: list[Any] = [engine.stream(prompt, greedy(15)) for prompt in prompts]
    tokens = [[*next(stream).token_ids] for stream in streams]
    streams[1].close()
    for i in (0, 2):
        tokens[i] += [token_id for chunk in streams[i] for token_id in chunk.token_ids]
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]
    assert tokens[1] == expected[1][:1]
    assert_idle(engine)


def test_generate_while_a_stream_is_open_loses_none_of_its_chunks(folder: Path) -> None:
    engine = tiny_engine(folder)
    first, second = rows(9, 5)
    expected = tokens_of(engine, [first, second], greedy(15))
    stream = engine.stream(first, greedy(15))
    tokens = [*next(stream).token_ids]
    assert engine.generate(second, greedy(15))[0].token_ids == expected[1]
    tokens += [token_id for chunk in stream for token_id in chunk.token_ids]
    assert tokens == expected[0]


def test_a_refused_prompt_alone_raises_before_the_first_chunk(chain: Engine) -> None:
    with pytest.raises(ValueError, match="no token"):
        chain.stream("", greedy())
    assert_idle(chain)


def test_a_refused_prompt_of_a_batch_is_one_chunk_and_the_others_are_served(chain: Engine) -> None:
    chunks = list(chain.stream(["A", [260], "C"], greedy(3)))
    (refused,) = (chunk for chunk in chunks if chunk.prompt_index == 1)
    assert refused.finish_reason == "error" and "token id 260" in str(refused.error)
    texts = ["".join(c.text for c in chunks if c.prompt_index == i) for i in (0, 2)]
    assert texts == ["BCD", "DEF"]
    assert_idle(chain)


class BrokenError(Exception):
    """Any failure of a step."""


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
def test_a_step_that_raises_ends_what_it_ran_and_the_engine_lives(
    folder: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(folder)
    prompts = rows(9, 5, 12)
    expected = tokens_of(engine, prompts, greedy(9))
    other = engine.stream(prompts[0], greedy(9, prompt_logprobs=1))
    tokens = [*next(other).token_ids]
    collect = engine.core.executor.collect

    def fail_once() -> StepResult:
        monkeypatch.setattr(engine.core.executor, "collect", collect)
        collect()
        raise error

    monkeypatch.setattr(engine.core.executor, "collect", fail_once)
    with pytest.raises(error):
        engine.generate(prompts[1:], greedy(9))
    ends = list(other)
    assert [chunk.finish_reason for chunk in ends] == ["error"]
    assert tokens == expected[0][:1]
    assert_idle(engine)
    assert tokens_of(engine, prompts, greedy(9)) == expected
    assert_idle(engine)


def test_two_engines_of_different_models_stream_in_turn(folder: Path, tmp_path: Path) -> None:
    qwen, _ = tiny_checkpoint(tmp_path, "qwen3", seed=1)
    prompts = rows(9, 17)
    alone = [tokens_of(tiny_engine(each), prompts, greedy(15)) for each in (folder, qwen)]
    engines = tiny_engine(folder), tiny_engine(qwen, block_size=8, dtype="float64")
    streams = [engine.stream(prompts, greedy(15)) for engine in engines]
    tokens: list[list[list[int]]] = [[[], []], [[], []]]
    for _ in range(30):
        for answers, stream in zip(tokens, streams, strict=True):
            chunk = next(stream)
            answers[chunk.prompt_index] += chunk.token_ids
    assert tokens == alone
    assert tokens[0] != tokens[1]
    for engine, stream in zip(engines, streams, strict=True):
        assert list(stream) == []
        assert_idle(engine)


def test_threads_that_share_an_engine_get_what_each_gets_alone(folder: Path) -> None:
    engine = tiny_engine(folder)
    batches = [rows(9, 30, seed=seed) for seed in range(4)]
    alone = [tokens_of(engine, batch, greedy(20)) for batch in batches]

    def answers(index: int) -> tuple[Any, int]:
        """By one thread, with a stream that nobody reads to its end."""
        engine.stream(batches[index], greedy(20)).close()
        found = tokens_of(engine, batches[index], greedy(20))
        return found, len(engine.expert_load())

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(answers, range(4))) == [(tokens, 0) for tokens in alone]
    assert_idle(engine)
