"""What the prefix cache shares, and what it must not."""

from pathlib import Path

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import assert_idle, greedy, rows, tiny_engine

from rackmount import Engine

PROMPT = rows(18)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")[0]


@pytest.fixture
def engine(folder: Path) -> Engine:
    return tiny_engine(folder)


def test_a_prompt_that_shares_10_tokens_hits_2_blocks_of_4(engine: Engine) -> None:
    other = rows(6, seed=1)[0]
    engine.generate(PROMPT, greedy(3))
    (output,) = engine.generate(PROMPT[:10] + other, greedy(3))
    assert output.num_cached_tokens == 8
    assert engine.stats.total_prefix_hits == 8
    assert engine.stats.total_prefix_queries == len(PROMPT) + 16


def test_answers_are_shared_too_as_the_next_turn_of_a_chat_needs(engine: Engine) -> None:
    (first,) = engine.generate(PROMPT, greedy(9))
    turn = PROMPT + first.token_ids + [5, 6]
    assert engine.generate(turn, greedy(3))[0].num_cached_tokens == 24


def test_hits_of_a_batch_are_counted_for_each_prompt(engine: Engine) -> None:
    engine.generate(PROMPT, greedy(2))
    outputs = engine.generate([PROMPT, PROMPT[:9], rows(9, seed=1)[0]], greedy(2))
    assert [output.num_cached_tokens for output in outputs] == [16, 8, 0]


def test_only_equal_salts_share(engine: Engine) -> None:
    hits = []
    for salt in (None, "a", "b", "a", None, ""):
        (output,) = engine.generate(PROMPT, greedy(4), cache_salt=salt)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 0, 16, 16, 16]


def test_a_reset_forgets_every_prefix(engine: Engine) -> None:
    (before,) = engine.generate(PROMPT, greedy(4))
    assert engine.reset_prefix_cache() == 5  # 21 tokens have their KV
    assert engine.reset_prefix_cache() == 0
    (after,) = engine.generate(PROMPT, greedy(4))
    assert after.num_cached_tokens == 0
    assert after.token_ids == before.token_ids


def test_a_reset_amid_an_answer_changes_none_of_its_tokens(engine: Engine) -> None:
    (expected,) = engine.generate(PROMPT, greedy(12))
    engine.reset_prefix_cache()
    tokens = []
    for chunk in engine.stream(PROMPT, greedy(12)):
        tokens += chunk.token_ids
        engine.reset_prefix_cache()
    assert tokens == expected.token_ids
    assert engine.generate(PROMPT, greedy(1))[0].num_cached_tokens == 0


def test_a_pool_full_of_cached_blocks_gives_the_oldest_up(folder: Path) -> None:
    engine = tiny_engine(folder, num_kv_blocks=10)
    first, second, third = rows(16, 16, 16, seed=1)
    for prompt in (first, second, third):
        engine.generate(prompt, greedy(1))
    assert engine.generate(third, greedy(1))[0].num_cached_tokens == 12
    assert engine.generate(first, greedy(1))[0].num_cached_tokens < 12
    assert_idle(engine)


def test_without_the_cache_nothing_is_shared(folder: Path) -> None:
    engine = tiny_engine(folder, enable_prefix_caching=False)
    for _ in range(2):
        assert engine.generate(PROMPT, greedy(4))[0].num_cached_tokens == 0
    assert engine.stats.total_prefix_queries == 0
    assert engine.reset_prefix_cache() == 0
