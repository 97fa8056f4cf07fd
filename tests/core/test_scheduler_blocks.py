"""The scheduler and its blocks: growth, prefix hits, preemption."""

import msgspec
import numpy as np
import pytest
from tests.helpers.scheduling import (
    assert_pool_conserved,
    counts_of_step,
    request_of,
    run_alone,
    scheduler_of,
    step,
)

from rackmount.scheduling.plan import StepPlan
from rackmount.scheduling.request import RequestState

# Blocks and plans


def test_growth_names_row_column_and_block_only_when_a_block_is_needed() -> None:
    scheduler = scheduler_of(block_size=4)
    scheduler.add(request_of("a", range(4)))
    plan, _ = step(scheduler)
    assert plan.admitted[0].block_ids[0].size == 1 and plan.grown[0].rows.size == 0
    sizes = []
    for _ in range(5):
        plan, _ = step(scheduler)
        growth = plan.grown[0]
        sizes.append(growth.rows.size)
        if growth.rows.size:
            assert growth.rows.tolist() == plan.rows.tolist()
            request = scheduler._requests["a"]
            assert growth.columns.tolist() == [len(request.blocks) - 1]
            assert growth.block_ids.tolist() == [request.blocks[-1].block_id]
    assert sizes == [1, 0, 0, 0, 1]


def test_a_chunk_over_several_blocks_grows_by_all_of_them() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=9)
    scheduler.add(request_of("a", range(20)))
    assert step(scheduler)[0].admitted[0].block_ids[0].size == 3
    growth = step(scheduler)[0].grown[0]
    assert growth.rows.tolist() == [0, 0] and growth.columns.tolist() == [3, 4]
    blocks = scheduler._requests["a"].blocks
    assert growth.block_ids.tolist() == [block.block_id for block in blocks[3:]]


def test_counts_are_exact_when_idle_after_long_and_short_prompts_in_chunks() -> None:
    scheduler = scheduler_of(block_size=16, max_num_batched_tokens=40, num_blocks=30)
    for index, length in enumerate([3, 150, 16, 31, 90]):
        scheduler.add(request_of(str(index), range(length), max_tokens=20))
    while scheduler.has_requests:
        step(scheduler)
        assert_pool_conserved(scheduler.pool)
    assert scheduler.pool.num_free == 30
    assert scheduler.stats.kv_usage == 0


def encoded_size(plan: StepPlan) -> int:
    return len(msgspec.msgpack.encode(plan, enc_hook=lambda array: array.tobytes()))


@pytest.mark.parametrize("context", [64, 3000])
def test_a_decode_plan_of_256_rows_is_small_whatever_the_context(context: int) -> None:
    scheduler = scheduler_of(
        num_blocks=50_000,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=10**6,
        max_model_len=4000,
    )
    for index in range(256):
        prompt = np.random.default_rng(index).integers(0, 1000, context - index % 16)
        scheduler.add(request_of(str(index), prompt))
    step(scheduler)
    plans = [step(scheduler)[0] for _ in range(16)]
    assert sum(plan.grown[0].rows.size for plan in plans) == 256
    assert max(map(encoded_size, plans)) < 3500


# Prefix cache


def test_a_second_prompt_that_shares_ten_tokens_computes_from_the_eighth() -> None:
    scheduler = scheduler_of(block_size=4)
    scheduler.add(request_of("a", [*range(10), 90, 91]))
    step(scheduler)
    second = request_of("b", [*range(10), 80, 81])
    scheduler.add(second)
    plan, _ = step(scheduler)
    (entry,) = plan.admitted
    assert entry.num_computed_tokens == second.num_cached_tokens == 8
    first_blocks = [block.block_id for block in scheduler._requests["a"].blocks]
    assert entry.block_ids[0].tolist()[:2] == first_blocks[:2]
    assert plan.num_tokens.tolist() == [1, 4]
    assert scheduler.stats.total_prefix_hits == 8
    assert scheduler.stats.total_prefix_queries == 24


def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_block() -> None:
    scheduler = scheduler_of(block_size=4)
    scheduler.add(request_of("a", range(12), max_tokens=1))
    step(scheduler)
    scheduler.add(request_of("b", range(12), max_tokens=1))
    plan, output = step(scheduler)
    assert plan.admitted[0].num_computed_tokens == 8
    assert plan.num_tokens.tolist() == [4] and plan.samples.tolist() == [True]
    assert len(output.finished) == 1


def test_a_full_block_becomes_a_hit_only_once_it_is_computed() -> None:
    scheduler = scheduler_of(block_size=4)
    scheduler.add(request_of("a", range(12)))
    scheduler.add(request_of("b", range(12)))
    plan = scheduler.schedule()
    assert plan is not None
    assert [entry.num_computed_tokens for entry in plan.admitted] == [0, 0]
    scheduler.add(request_of("c", range(12)))
    early = scheduler.schedule()  # the first step is still in flight
    assert early is not None
    assert [entry.num_computed_tokens for entry in early.admitted] == [0]
    scheduler.update(plan, np.array([1, 1]))
    scheduler.add(request_of("d", range(12)))
    late = scheduler.schedule()
    assert late is not None
    assert [entry.num_computed_tokens for entry in late.admitted] == [8]


def test_output_blocks_are_hits_for_the_next_turn() -> None:
    scheduler = scheduler_of(block_size=4)
    first = request_of("a", range(6), max_tokens=7)
    run_alone(scheduler, first, [50, 51, 52, 53, 54, 55, 56])
    scheduler.add(request_of("b", [*range(6), 50, 51, 52, 53, 54, 55, 56, 60, 61]))
    plan, _ = step(scheduler)
    assert plan.admitted[0].num_computed_tokens == 12  # the 13th token was never computed


def test_a_request_for_prompt_logprobs_computes_its_prompt_but_may_be_hit() -> None:
    scheduler = scheduler_of(block_size=4)
    for name in "ab":
        scheduler.add(request_of(name, range(9), use_cached_prefix=False))
        plan, _ = step(scheduler)
        assert plan.admitted[0].num_computed_tokens == 0
    assert scheduler.stats.total_prefix_queries == 0
    scheduler.add(request_of("c", range(9)))
    plan, _ = step(scheduler)
    assert plan.admitted[0].num_computed_tokens == 8


def test_without_prefix_caching_nothing_is_named() -> None:
    scheduler = scheduler_of(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(request_of(name, range(9)))
        assert step(scheduler)[0].admitted[0].num_computed_tokens == 0
    assert scheduler.pool.cached == {}


def test_after_a_reset_neither_old_blocks_nor_those_built_on_them_are_hits() -> None:
    scheduler = scheduler_of(block_size=4)
    scheduler.add(request_of("a", range(8), max_tokens=20))
    step(scheduler)
    assert scheduler.reset_prefix_cache() == 2
    for _ in range(8):
        step(scheduler, token_id=5)
    assert scheduler.pool.cached == {}
    scheduler.add(request_of("b", [*range(8), 5, 5, 5, 5]))
    plan, _ = step(scheduler)
    assert plan.admitted[0].num_computed_tokens == 0
    assert scheduler.pool.cached != {}


# Preemption


def test_the_last_in_order_is_preempted_and_resumes_with_a_cache_hit() -> None:
    scheduler = scheduler_of(block_size=4, num_blocks=6)
    first, second = request_of("a", range(8)), request_of("b", range(100, 110))
    scheduler.add(first)
    scheduler.add(second)
    assert counts_of_step(scheduler, 7) == {"a": 8, "b": 10}
    assert counts_of_step(scheduler, 7) == {"a": 1, "b": 1}  # all 6 blocks are in use now
    assert counts_of_step(scheduler, 7) == {"a": 1, "b": 1}
    assert counts_of_step(scheduler, 7) == {"a": 1}
    assert scheduler.stats.total_preemptions == 1
    assert second.state is RequestState.WAITING and second.row == -1 and not second.blocks
    assert second.output_token_ids.tolist() == [7, 7, 7]
    scheduler.finish("a", "abort")
    plan, _ = step(scheduler, 7)
    (entry,) = plan.admitted
    assert entry.token_ids.tolist() == [*range(100, 110), 7, 7, 7]
    assert (entry.num_prompt_tokens, entry.num_computed_tokens) == (10, 12)
    assert second.num_cached_tokens == 0  # of the first admission
    assert plan.num_tokens.tolist() == [1]


def test_nobody_enters_in_the_step_of_a_preemption() -> None:
    scheduler = scheduler_of(block_size=4, num_blocks=5)
    scheduler.add(request_of("a", range(8)))
    scheduler.add(request_of("b", range(100, 112)))
    step(scheduler)
    scheduler.add(request_of("c", [9]))
    plan, _ = step(scheduler)
    assert not plan.admitted and scheduler.stats.total_preemptions == 1
    assert [request.request_id for request in scheduler._waiting] == ["b", "c"]


def test_the_victim_is_the_least_urgent_though_it_came_first() -> None:
    scheduler = scheduler_of(policy="priority", block_size=4, num_blocks=4)
    scheduler.add(request_of("idle", range(8), priority=5))
    step(scheduler)
    scheduler.add(request_of("urgent", range(100, 104), priority=1))
    assert counts_of_step(scheduler) == {"idle": 1, "urgent": 4}
    assert counts_of_step(scheduler) == {"urgent": 1}
    assert scheduler._requests["idle"].state is RequestState.WAITING


def test_a_request_alone_is_never_preempted() -> None:
    scheduler = scheduler_of(block_size=4, num_blocks=3)
    scheduler.add(request_of("a", range(5)))
    scheduler.add(request_of("b", range(5)))
    for _ in range(200):
        if not scheduler.has_requests:
            break
        step(scheduler)
    assert not scheduler.has_requests
    assert scheduler.stats.total_sampled_tokens == 2 * 8


def test_a_long_cached_prefix_is_not_matched_again_while_blocks_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_of(block_size=4, num_blocks=10)
    scheduler.add(request_of("a", range(16), max_tokens=20))
    step(scheduler)
    scheduler.add(request_of("b", [*range(16), *range(100, 124)], max_tokens=1))
    matches = []
    match = scheduler._prefix_cache.match
    monkeypatch.setattr(
        scheduler._prefix_cache, "match", lambda *args: matches.append(args) or match(*args)
    )
    while scheduler.has_requests:
        step(scheduler)
    assert len(matches) == 2  # when it came, and when there was room
