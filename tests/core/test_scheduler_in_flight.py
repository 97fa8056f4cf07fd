"""The scheduler between `schedule` and `update`: nothing that a step uses is given away."""

import numpy as np
import pytest
from tests.helpers.scheduling import (
    assert_pool_conserved,
    counts_of_step,
    request_of,
    scheduled,
    scheduler_of,
    step,
)


def test_what_a_step_in_flight_uses_is_not_given_away() -> None:
    scheduler = scheduler_of(block_size=4, num_blocks=4, max_num_seqs=1)
    first = request_of("a", range(8))
    scheduler.add(first)
    plan = scheduler.schedule()
    assert plan is not None
    used = {block.block_id for block in first.blocks}
    scheduler.finish("a", "abort")
    scheduler.add(request_of("b", range(16)))
    assert scheduler.schedule() is None and scheduler.pool.num_free == 2
    output = scheduler.update(plan, np.array([5]))
    assert output.requests == [] and output.finished == [] and output.token_ids.size == 0
    assert first.output_token_ids.size == 0
    assert scheduler.pool.cached == {}  # nobody knows whether the step wrote all of it
    plan, _ = step(scheduler)
    assert plan.released == [0] and [entry.row for entry in plan.admitted] == [0]
    assert used <= set(plan.admitted[0].block_ids[0].tolist())


def test_a_step_may_be_scheduled_before_the_last_ones_tokens_are_known() -> None:
    scheduler = scheduler_of()
    request = request_of("a", [1, 2, 3], max_tokens=4, stop_ids=frozenset({9}))
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert second.num_tokens.tolist() == [1] and second.samples.tolist() == [True]
    assert scheduler.update(first, np.array([5])).requests == [request]
    third = scheduler.schedule()
    assert third is not None
    assert scheduler.update(second, np.array([9])).finished == [request]
    assert scheduler.pool.num_free < 100
    assert scheduler.update(third, np.array([6])).requests == []
    assert scheduler.pool.num_free == 100
    assert request.output_token_ids.tolist() == [5, 9]


def test_steps_in_flight_never_run_past_the_limit() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [1, 2, 3], max_tokens=2))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.schedule() is None
    for plan in plans:
        assert plan is not None
        scheduler.update(plan, np.array([5]))
    assert not scheduler.has_requests


def test_with_a_step_in_flight_rows_wait_for_blocks_and_nobody_is_preempted() -> None:
    scheduler = scheduler_of(block_size=4, num_blocks=3)
    scheduler.add(request_of("a", range(4)))
    scheduler.add(request_of("b", range(100, 107)))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert scheduled(scheduler, first) == {"a": 4, "b": 7}
    assert scheduled(scheduler, second) == {"b": 1}  # fits its block; a lacks one
    scheduler.update(first, np.array([5, 5]))
    assert scheduler.schedule() is None and scheduler.stats.total_preemptions == 0
    scheduler.update(second, np.array([5]))
    assert counts_of_step(scheduler) == {"a": 1}
    assert scheduler.stats.total_preemptions == 1


def test_steps_end_in_order() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [1, 2, 3]))
    scheduler.schedule()
    second = scheduler.schedule()
    assert second is not None
    with pytest.raises(AssertionError, match="in the order"):
        scheduler.update(second, np.array([5]))


def test_a_step_that_breaks_ends_its_requests_alone() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    for name in "ab":
        scheduler.add(request_of(name, range(8)))
    plan = scheduler.schedule()
    assert plan is not None
    (failed,) = scheduler.fail(plan)
    assert (failed.request_id, failed.finish_reason) == ("a", "error")
    assert_pool_conserved(scheduler.pool)
    assert scheduler.pool.num_free == 100 and scheduler.pool.cached == {}
    assert counts_of_step(scheduler) == {"b": 8}


def test_a_waiting_request_can_be_aborted() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    for name in "abc":
        scheduler.add(request_of(name, [1, 2]))
    step(scheduler)
    aborted = scheduler.finish("b", "abort")
    assert aborted is not None and aborted.finish_reason == "abort"
    scheduler.finish("a", "abort")
    assert counts_of_step(scheduler) == {"c": 2}
