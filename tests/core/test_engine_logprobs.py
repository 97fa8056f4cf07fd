"""Log-probabilities of prompts and answers, whatever happens to the request meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import VOCAB, tiny_checkpoint
from tests.helpers.engines import assert_idle, greedy, rows, tiny_engine

from rackmount import RequestOutput, SamplingParams
from rackmount_registry.errors import ConfigError

PROMPT = rows(40)[0]
ASKS = greedy(6, prompt_logprobs=3, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")[0]


@pytest.fixture(scope="module")
def whole(folder: Path) -> RequestOutput:
    """Prompt and answer by an engine that does nothing else."""
    return tiny_engine(folder).generate(PROMPT, ASKS)[0]


def assert_equal(output: RequestOutput, expected: RequestOutput) -> None:
    """The same entries, to the rounding of float32."""
    pairs = [(output.outputs[0].logprobs, expected.outputs[0].logprobs)]
    pairs.append((output.prompt_logprobs, expected.prompt_logprobs))
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            if other is None:
                assert mine is None
                continue
            assert mine is not None
            assert (mine.token_id, mine.rank) == (other.token_id, other.rank)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert mine.top == pytest.approx(other.top, abs=1e-4)


def test_every_prompt_token_but_the_first_has_an_entry(whole: RequestOutput) -> None:
    entries = whole.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [entry and entry.token_id for entry in entries[1:]] == PROMPT[1:]
    for entry in entries[1:]:
        assert entry is not None
        assert len(entry.top) == 3
        assert list(entry.top.values()) == sorted(entry.top.values(), reverse=True)
        assert (entry.rank <= 3) == (entry.token_id in entry.top)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 8},
        {"long_prefill_token_threshold": 7},
        {"block_size": 16},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_prompt_logprobs_in_chunks_are_those_of_the_whole(
    arguments: dict[str, Any], folder: Path, whole: RequestOutput
) -> None:
    engine = tiny_engine(folder, **arguments)
    others = engine.stream(rows(30, 9, seed=3), greedy(9))
    next(others)
    assert_equal(engine.generate(PROMPT, ASKS)[0], whole)


@pytest.mark.parametrize("num_rows", [1, 7])
def test_prompt_logprobs_are_the_same_with_fewer_logits_held_at_once(
    num_rows: int, folder: Path, whole: RequestOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rackmount.execution.worker.MAX_PROMPT_LOGITS", num_rows * VOCAB)
    assert_equal(tiny_engine(folder).generate(PROMPT, ASKS)[0], whole)


def test_prompt_logprobs_of_a_cached_prompt_are_computed_again(
    folder: Path, whole: RequestOutput
) -> None:
    engine = tiny_engine(folder)
    engine.generate(PROMPT, greedy(6))
    output = engine.generate(PROMPT, ASKS)[0]
    assert output.num_cached_tokens == 0
    assert_equal(output, whole)
    assert engine.generate(PROMPT, greedy(6))[0].num_cached_tokens == 36


@pytest.mark.parametrize("chunk", [0, 2], ids=["amid the answer", "amid the prompt"])
def test_prompt_logprobs_after_a_preemption_are_those_of_the_whole(
    chunk: int, folder: Path, whole: RequestOutput
) -> None:
    engine = tiny_engine(folder, num_kv_blocks=14, long_prefill_token_threshold=chunk)
    prompts = [*rows(4, 4, seed=3), PROMPT]  # the last one is preempted first
    *_, output = engine.generate(prompts, [greedy(20), greedy(20), ASKS])
    assert engine.stats.total_preemptions > 0
    assert_equal(output, whole)


def test_as_many_entries_as_asked_for_whatever_the_batch_mates_ask(folder: Path) -> None:
    engine = tiny_engine(folder)
    params = [greedy(4), greedy(4, logprobs=0), greedy(4, logprobs=5), greedy(4, logprobs=VOCAB)]
    none, own, some, full = engine.generate([PROMPT] * 4, params)
    assert none.outputs[0].logprobs is None
    for output, num in ((own, 0), (some, 5), (full, VOCAB)):
        assert output.token_ids == none.token_ids
        entries = output.outputs[0].logprobs
        assert entries is not None
        assert [entry.token_id for entry in entries] == none.token_ids
        assert [len(entry.top) for entry in entries] == [num] * 4
        assert [entry.rank for entry in entries] == [1] * 4
    for entry in full.outputs[0].logprobs or ():
        assert torch.tensor(list(entry.top.values())).exp().sum().item() == pytest.approx(1)


def test_logprobs_are_of_the_model_s_own_distribution(folder: Path) -> None:
    engine = tiny_engine(folder)
    plain = engine.generate(PROMPT, greedy(1, logprobs=VOCAB))[0].outputs[0].logprobs
    bent = SamplingParams(
        temperature=3.0,
        top_k=4,
        seed=0,
        max_tokens=1,
        logprobs=VOCAB,
        repetition_penalty=2.0,
        logit_bias={3: 50.0},
    )
    output = engine.generate(PROMPT, bent)[0].outputs[0]
    assert plain is not None
    assert output.logprobs is not None
    assert output.token_ids == [3]
    assert output.logprobs[0].top == pytest.approx(plain[0].top)
    assert output.logprobs[0].logprob == pytest.approx(plain[0].top[3])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_entries_than_the_vocabulary_are_refused(folder: Path, name: str) -> None:
    engine = tiny_engine(folder)
    with pytest.raises(ConfigError, match=f"{name}=98 .* from 0 to 97"):
        engine.generate(PROMPT, SamplingParams(**{name: 98}))
    assert_idle(engine)
