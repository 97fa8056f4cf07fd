"""The scheduler between `schedule` and `update`: nothing that a step uses is given away."""

from collections import deque
from itertools import count

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

from rackmount.scheduling.plan import StepPlan
from rackmount.scheduling.request import RequestState


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


def test_who_lacks_blocks_waits_for_what_is_in_flight_and_nobody_goes_on_meanwhile() -> None:
    scheduler = scheduler_of(block_size=4, num_blocks=3)
    scheduler.add(request_of("a", range(4)))
    scheduler.add(request_of("b", range(100, 107)))
    first = scheduler.schedule()
    assert first is not None and scheduled(scheduler, first) == {"a": 4, "b": 7}
    assert scheduler.schedule() is None  # a lacks a block, b would fit its own
    assert scheduler.stats.total_preemptions == 0
    scheduler.update(first, np.array([5, 5]))
    assert counts_of_step(scheduler) == {"a": 1}
    assert scheduler.stats.total_preemptions == 1


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_is_not_overtaken_without_end(depth: int, mixed: bool) -> None:
    """Short requests arrive without pause, and take each block that is free."""
    scheduler = scheduler_of(
        block_size=16,
        num_blocks=65,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=1010,
        enable_prefix_caching=False,
        enable_mixed_steps=mixed,
    )
    begun, arrived = 0, count()
    long = request_of("long", range(1000), max_tokens=2)
    in_flight: deque[StepPlan] = deque()
    for number in range(500):
        if number == 20:
            scheduler.add(long)
        while scheduler.stats.num_waiting < 10:
            short = next(arrived)
            scheduler.add(request_of(f"{short}", range(3 + short % 3), max_tokens=2 + short % 7))
        while len(in_flight) < depth and (plan := scheduler.schedule()):
            in_flight.append(plan)
        plan = in_flight.popleft()
        scheduler.update(plan, np.full(plan.samples.sum(), 1))
        if long.state is RequestState.RUNNING and not begun:
            begun = number
        if long.finish_reason:
            break
    assert long.finish_reason == "length" and number - begun < 20


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
