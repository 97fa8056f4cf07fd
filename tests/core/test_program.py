"""Ranks of an engine as threads: tensor parallelism itself, step by step, without processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import assert_idle, distributions, greedy, rows, tiny_engine, tokens_of
from tests.helpers.executors import threads
from tests.helpers.loads import VOCAB, Load, check, loads, watched

from rackmount import Engine, SamplingParams
from rackmount.execution.program import RankProgram
from rackmount_registry.errors import PluginError
from rackmount_registry.executor import RankError

NUM_LAYERS = 2


def ranks(folder: Path, tp: int, **arguments: Any) -> Engine:
    """An engine on `tp` threads."""
    return tiny_engine(folder, manager=threads(), executor="threads", tp=tp, **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "qwen3", vocab_size=VOCAB, hidden_size=32
    )[0]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(load=loads())
def test_every_load_of_two_ranks_gives_every_request_the_answer_of_its_run_alone(
    load: Load, folder: Path
) -> None:
    with ranks(folder, 2, dtype="float64", **load.engine) as engine:
        check(load, folder, watched(engine))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(load=loads())
def test_every_one_of_many_loads_of_two_ranks_gives_every_request_its_answer_alone(
    load: Load, folder: Path
) -> None:
    with ranks(folder, 2, dtype="float64", **load.engine) as engine:
        check(load, folder, watched(engine))


def counted(engine: Engine) -> list[tuple[int, dict[str, int]]]:
    """Follows the steps of `engine`: tokens, and the collectives of each rank."""
    executor: Any = engine.core.executor
    submit, steps = executor.submit, []

    def counting(plan: Any) -> None:
        executor.forget_calls()
        submit(plan)
        first, *others = executor.calls
        assert others == [first] * (engine.config.tp - 1)
        steps.append((plan.total_num_tokens, first))

    executor.submit = counting
    return steps


def test_a_step_has_two_sums_a_layer_one_for_the_embedding_and_one_gather(folder: Path) -> None:
    """Sampling has none: every rank draws the same token by itself."""
    with ranks(folder, 2, long_prefill_token_threshold=7) as engine:
        steps = counted(engine)
        engine.generate(rows(5, 20, vocab=VOCAB), SamplingParams(max_tokens=6, seed=1, top_k=5))
        sums = {"all_reduce": 2 * NUM_LAYERS + 1}
        assert [calls for _, calls in steps] == [sums | {"all_gather": 1}] * len(steps)
        steps.clear()
        engine.generate(rows(20, vocab=VOCAB)[0], greedy(2))
        # Of the prompt in three chunks, the first two sample nothing and so gather nothing.
        chunks = [sums, sums, sums | {"all_gather": 1}, sums | {"all_gather": 1}]
        assert [calls for _, calls in steps] == chunks


def test_logits_are_gathered_for_sampled_rows_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(folder, 2) as engine:
        shapes = []
        member = engine.core.executor.group.members[0]  # type: ignore[attr-defined]
        gather = member.all_gather
        monkeypatch.setattr(member, "all_gather", lambda x: shapes.append(x.shape) or gather(x))
        engine.generate(rows(20, 11, vocab=VOCAB), greedy(3))
        assert shapes == [(2, -(-VOCAB // 2))] * 3


@pytest.mark.parametrize("params", [greedy(12), SamplingParams(seed=3, max_tokens=12, top_p=0.9)])
def test_every_rank_samples_the_same_tokens(params: SamplingParams, folder: Path) -> None:
    with ranks(folder, 4) as engine:
        executor: Any = engine.core.executor
        collect_all, count = executor.collect_all, []

        def compared() -> Any:
            results = collect_all()
            for result in results[1:]:
                np.testing.assert_array_equal(result.token_ids, results[0].token_ids)
            count.append(len(results))
            return results

        executor.collect_all = compared
        engine.generate(rows(9, 4, vocab=VOCAB), params)
        assert count == [4] * 12


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 8}),
    "llama with one KV head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"num_attention_heads": 8}),
    "qwen3 with wide heads": ("qwen3", {"num_attention_heads": 8, "head_dim": 24}),
    "qwen3-moe": ("qwen3-moe", {"num_attention_heads": 8}),
}


QUICK = {
    *(("llama", 2), ("llama", 8), ("llama with one KV head", 4), ("qwen3", 4)),
    *(("qwen3 with wide heads", 8), ("qwen3-moe", 2), ("qwen3-moe", 8)),
}


@pytest.mark.parametrize(
    ("case", "tp"),
    [
        pytest.param(case, tp, marks=() if (case, tp) in QUICK else pytest.mark.slow)
        for case in CASES
        for tp in (2, 4, 8)
    ],
)
def test_logits_and_text_of_any_number_of_ranks_equal_those_of_one(
    case: str, tp: int, tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    made, _ = tiny_checkpoint(tmp_path, family, **overrides)
    everything = greedy(10, logprobs=97, prompt_logprobs=97)
    prompts = rows(17, 5)
    outputs = []
    for engine in (tiny_engine(made), ranks(made, tp)):
        with engine:
            outputs.append(engine.generate(prompts, everything))
            assert_idle(engine)
    for one, many in zip(*outputs, strict=True):
        assert many.token_ids == one.token_ids
        for mine, other in (
            (many.outputs[0].logprobs, one.outputs[0].logprobs),
            (many.prompt_logprobs[1:], one.prompt_logprobs[1:]),
        ):
            difference = distributions(mine) - distributions(other)
            assert difference.abs().max() < 1e-5


def test_the_pool_is_as_large_as_the_rank_with_the_least_room_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = RankProgram._load
    rooms = iter((30, 20))

    def loaded(self: RankProgram) -> Any:
        result = load(self)
        result.num_kv_blocks = next(rooms)
        return result

    monkeypatch.setattr(RankProgram, "_load", loaded)
    with ranks(folder, 2) as engine:
        assert engine.core.num_kv_blocks == engine.core.scheduler.pool.num_free == 20
        per_token = engine.rack.kv_bytes_per_token
        assert engine.core.kv_bytes == 2 * 20 * engine.rack.block_size * per_token


def test_ranks_read_every_split_weight_once_and_hold_their_share(folder: Path) -> None:
    with tiny_engine(folder) as one, ranks(folder, 2) as two:
        whole = one.core.weight_bytes_read
        norms = sum(
            storage.num_bytes(one.rack.dtype)
            for storage in one.rack.draft.storages()
            if all("norm" in piece.name for piece in storage.pieces)
        )
        assert two.core.weight_bytes_read == whole + norms
        assert 0 < norms < whole / 10


def test_a_rank_of_other_plugins_is_refused_with_the_distribution(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rackmount_registry.manifest import ManifestEntry
    from rackmount_registry.plugins import PluginManager

    mine = PluginManager.manifest
    calls: list[int] = []

    def second_differs(self: PluginManager) -> Any:
        calls.append(1)
        return mine(self) + ((ManifestEntry("zzz", "2", "ab"),) if len(calls) == 3 else ())

    monkeypatch.setattr(PluginManager, "manifest", second_differs)
    with pytest.raises(PluginError, match="zzz: the driver has none, this process version 2"):
        ranks(folder, 2)


def test_when_the_ranks_are_gone_every_request_ends_and_no_other_is_taken(folder: Path) -> None:
    with ranks(folder, 2, max_num_seqs=1) as engine:
        streams = [engine.stream(prompt, greedy(9)) for prompt in rows(5, 6, vocab=VOCAB)]
        next(streams[0])
        executor: Any = engine.core.executor

        def lost() -> Any:
            raise RankError(1, "rank 1 was killed")

        executor.collect = lost
        with pytest.raises(RankError, match="rank 1 was killed"):
            tokens_of(engine, rows(4, vocab=VOCAB), greedy(3))
        assert [[chunk.finish_reason for chunk in stream] for stream in streams] == [["error"]] * 2
        assert_idle(engine)
        with pytest.raises(RankError, match="the engine is down: rank 1 was killed"):
            tokens_of(engine, rows(4, vocab=VOCAB), greedy(3))
