"""The scheduler: budget and order, what is refused at the door, how requests end."""

from typing import Any

import pytest
from tests.helpers.scheduling import (
    counts_of_step,
    request_of,
    run_alone,
    scheduler_of,
    step,
)

from rackmount_registry.errors import ConfigError

# Budget and order


def test_a_prompt_is_computed_in_chunks_of_the_budget_then_decoded() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=4)
    scheduler.add(request_of("a", range(10)))
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [plan.num_tokens.tolist() for plan in plans] == [[4], [4], [2], [1]]
    assert [plan.samples.tolist() for plan in plans] == [[False], [False], [True], [True]]
    assert [len(plan.admitted) for plan in plans] == [1, 0, 0, 0]


def test_running_requests_come_before_waiting_ones() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=5)
    scheduler.add(request_of("a", range(3)))
    assert counts_of_step(scheduler) == {"a": 3}
    scheduler.add(request_of("b", range(9)))
    assert counts_of_step(scheduler) == {"a": 1, "b": 4}
    assert counts_of_step(scheduler) == {"a": 1, "b": 4}
    assert counts_of_step(scheduler) == {"a": 1, "b": 1}


def test_prompts_that_fill_steps_come_first_and_by_themselves_where_steps_are_not_mixed() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=5, enable_mixed_steps=False)
    scheduler.add(request_of("a", range(3)))
    assert counts_of_step(scheduler) == {"a": 3}
    scheduler.add(request_of("b", range(9)))
    assert counts_of_step(scheduler) == {"b": 5}
    scheduler.add(request_of("c", range(3)))
    assert counts_of_step(scheduler) == {"b": 4, "c": 1}
    assert counts_of_step(scheduler) == {"a": 1, "b": 1, "c": 2}
    scheduler.add(request_of("d", range(4)))
    assert counts_of_step(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 2}


def test_prompts_held_to_a_threshold_fill_no_step() -> None:
    scheduler = scheduler_of(
        max_num_batched_tokens=8, long_prefill_token_threshold=3, enable_mixed_steps=False
    )
    scheduler.add(request_of("a", range(3)))
    scheduler.add(request_of("b", range(9)))
    assert counts_of_step(scheduler) == {"a": 3, "b": 3}
    scheduler.add(request_of("c", range(9)))
    assert counts_of_step(scheduler) == {"a": 1, "b": 3, "c": 3}
    scheduler.add(request_of("d", range(9)))
    assert counts_of_step(scheduler) == {"b": 3, "c": 3, "d": 2}


def test_prompts_without_a_row_fill_no_step() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8, max_num_seqs=2, enable_mixed_steps=False)
    for index, name in enumerate("abcd"):
        prompt = range(10 * index, 10 * index + 6)
        scheduler.add(request_of(name, prompt, max_tokens=3 if name == "a" else 9))
    assert [counts_of_step(scheduler) for _ in range(2)] == [{"a": 6, "b": 2}, {"a": 1, "b": 4}]
    assert counts_of_step(scheduler) == {"a": 1, "b": 1}
    assert counts_of_step(scheduler) == {"b": 1, "c": 6}


def test_what_the_prefix_cache_has_fills_no_step() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16, block_size=4, enable_mixed_steps=False)
    scheduler.add(request_of("a", range(14), max_tokens=9))
    assert counts_of_step(scheduler) == {"a": 14}
    scheduler.add(request_of("b", range(15)))
    scheduler.add(request_of("c", range(13)))
    assert counts_of_step(scheduler) == {"a": 1, "b": 3, "c": 1}


def test_the_last_token_of_a_prompt_is_of_the_prompt() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8, enable_mixed_steps=False)
    scheduler.add(request_of("a", range(9)))
    scheduler.add(request_of("b", range(100, 110)))
    scheduler.add(request_of("c", range(200, 210)))
    assert counts_of_step(scheduler) == {"a": 8}
    assert counts_of_step(scheduler) == {"a": 1, "b": 7}


def test_a_prompt_waits_for_decoding_where_it_would_take_its_last_blocks() -> None:
    scheduler = scheduler_of(
        max_num_batched_tokens=11, num_blocks=4, block_size=4, enable_mixed_steps=False
    )
    scheduler.add(request_of("a", range(4), max_tokens=4))
    assert counts_of_step(scheduler) == {"a": 4}
    scheduler.add(request_of("b", range(5, 16), max_tokens=2))
    # b's three blocks are there, and a, which decodes, may need the last one.
    assert counts_of_step(scheduler) == {"a": 1}
    assert [counts_of_step(scheduler) for _ in range(3)] == [{"a": 1}, {"a": 1}, {"b": 11}]


def test_prompts_come_first_only_where_the_pool_holds_them_whole() -> None:
    scheduler = scheduler_of(
        max_num_batched_tokens=4, num_blocks=6, block_size=4, enable_mixed_steps=False
    )
    scheduler.add(request_of("a", range(4), max_tokens=6))
    assert counts_of_step(scheduler) == {"a": 4}
    scheduler.add(request_of("b", range(5, 21), max_tokens=2))
    # Of five blocks b's prompt takes four, and each of the two may need one more.
    assert counts_of_step(scheduler) == {"a": 1, "b": 3}
    assert scheduler.totals.total_preemptions == 0


def test_a_long_prompt_takes_no_more_than_its_threshold() -> None:
    scheduler = scheduler_of(long_prefill_token_threshold=6)
    scheduler.add(request_of("long", range(15)))
    scheduler.add(request_of("short", range(5)))
    assert counts_of_step(scheduler) == {"long": 6, "short": 5}
    assert counts_of_step(scheduler) == {"long": 6, "short": 1}
    assert counts_of_step(scheduler) == {"long": 3, "short": 1}


def test_the_budget_may_be_smaller_than_the_number_of_running_requests() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=2)
    for name in "abc":
        scheduler.add(request_of(name, [1], max_tokens=3))
    seen = [counts_of_step(scheduler) for _ in range(5)]
    assert seen[:4] == [{"a": 1, "b": 1}] * 3 + [{"c": 1}]
    assert all(sum(counts.values()) <= 2 for counts in seen)


def test_priority_goes_before_arrival_only_under_its_policy() -> None:
    for policy, first in (("fcfs", "early"), ("priority", "urgent")):
        scheduler = scheduler_of(policy=policy, max_num_seqs=1)
        scheduler.add(request_of("early", [1, 2], priority=0))
        scheduler.add(request_of("urgent", [1, 2], priority=-1))
        assert list(counts_of_step(scheduler)) == [first]


def test_requests_of_equal_priority_go_by_arrival() -> None:
    scheduler = scheduler_of(policy="priority", max_num_seqs=2)
    for name in "abc":
        scheduler.add(request_of(name, [1, 2], priority=2**70))
    assert list(counts_of_step(scheduler)) == ["a", "b"]


@pytest.mark.parametrize("max_num_seqs", [12, 20, 33])
def test_any_number_of_requests_up_to_the_limit_runs_at_once(max_num_seqs: int) -> None:
    scheduler = scheduler_of(max_num_seqs=max_num_seqs)
    for index in range(max_num_seqs + 1):
        scheduler.add(request_of(str(index), [1, 2, 3]))
    plan, _ = step(scheduler)
    assert sorted(plan.rows.tolist()) == list(range(max_num_seqs))
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (max_num_seqs, 1)


def test_nothing_to_do_is_no_plan() -> None:
    assert scheduler_of().schedule() is None


# The door


def test_what_can_never_run_is_refused_with_the_numbers_and_others_are_served() -> None:
    scheduler = scheduler_of(num_blocks=2, max_model_len=20)
    with pytest.raises(ValueError, match="17 tokens can never fit the KV cache; at most 8 do"):
        scheduler.add(request_of("big", range(17)))
    with pytest.raises(ValueError, match="prompt of 20 tokens must have 1 to 19"):
        scheduler.add(request_of("long", range(20)))
    with pytest.raises(ValueError, match="prompt of 0 tokens must have 1 to 19"):
        scheduler.add(request_of("empty", []))
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        scheduler.add(request_of("none", [1], max_tokens=0))
    with pytest.raises(ValueError, match="stop token 1000 must be in 0 to 999"):
        scheduler.add(request_of("stop", [1], stop_ids=frozenset({1000})))
    scheduler.add(request_of("fine", range(8)))
    assert counts_of_step(scheduler) == {"fine": 8}


def test_an_id_in_use_is_refused_until_its_request_is_finished() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [1]))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(request_of("a", [2]))
    scheduler.finish("a", "abort")
    scheduler.add(request_of("a", [3]))
    assert scheduler.stats.num_waiting == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"policy": "lifo"}, "policy='lifo' must be one of fcfs, priority"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1 must be"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_of(**limits)


# Ends


def test_a_request_yields_exactly_max_tokens() -> None:
    request = request_of("a", [1, 2], max_tokens=3)
    run_alone(scheduler_of(), request, [5, 6, 7, 8])
    assert request.output_token_ids.tolist() == [5, 6, 7]
    assert (request.finish_reason, request.stop_reason) == ("length", None)


def test_a_request_ends_at_the_models_length() -> None:
    request = request_of("a", [1, 2], max_tokens=10**12)
    run_alone(scheduler_of(max_model_len=5), request, [9] * 9)
    assert request.output_token_ids.tolist() == [9, 9, 9]
    assert request.finish_reason == "length"


def test_a_request_ends_where_the_pool_does_with_one_token_past_its_slots() -> None:
    request = request_of("a", [1, 2, 3, 4, 5], max_tokens=100)
    scheduler = scheduler_of(num_blocks=2)
    run_alone(scheduler, request, [9] * 9)
    assert request.output_token_ids.tolist() == [9, 9, 9, 9]
    assert request.finish_reason == "length"
    assert scheduler.stats.total_preemptions == 0


@pytest.mark.parametrize("stop", [1, 106])
def test_every_one_of_several_stop_tokens_ends_the_output(stop: int) -> None:
    request = request_of("a", [3], stop_ids=frozenset({1, 106}))
    run_alone(scheduler_of(), request, [5, stop, 7])
    assert request.output_token_ids.tolist() == [5, stop]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)


def test_the_first_sampled_token_may_be_a_stop() -> None:
    scheduler = scheduler_of()
    request = request_of("a", [3], stop_ids=frozenset({1}))
    run_alone(scheduler, request, [1])
    assert request.output_token_ids.tolist() == [1]
    run_alone(scheduler, request_of("b", [3], max_tokens=1), [1])


def test_no_stop_token_counts_before_min_tokens() -> None:
    request = request_of("a", [3], stop_ids=frozenset({1}), min_tokens=3)
    run_alone(scheduler_of(), request, [1, 1, 1, 1])
    assert request.output_token_ids.tolist() == [1, 1, 1]
    assert request.finish_reason == "stop"


def test_a_stop_token_as_the_last_one_allowed_is_a_stop() -> None:
    request = request_of("a", [3], max_tokens=2, stop_ids=frozenset({1}))
    run_alone(scheduler_of(), request, [5, 1])
    assert request.finish_reason == "stop"


def test_one_requests_stop_tokens_do_not_end_another() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [3], stop_ids=frozenset({7})))
    scheduler.add(request_of("b", [4]))
    _, output = step(scheduler, token_id=7)
    assert [request.request_id for request in output.finished] == ["a"]
    assert [request.request_id for request in output.requests] == ["a", "b"]
    assert not scheduler._stop_tokens.marks.any()


def test_a_stop_token_that_two_requests_share_outlives_the_first() -> None:
    scheduler = scheduler_of()
    for name in "ab":
        scheduler.add(request_of(name, [3], stop_ids=frozenset({7})))
    scheduler.finish("a", "abort")
    _, output = step(scheduler, token_id=7)
    assert [request.request_id for request in output.finished] == ["b"]


def test_the_front_end_may_end_a_request_by_a_stop_string() -> None:
    scheduler = scheduler_of()
    request = request_of("a", [3])
    scheduler.add(request)
    step(scheduler, token_id=8)
    assert scheduler.finish("a", "stop", "\n\n") is request
    assert (request.finish_reason, request.stop_reason) == ("stop", "\n\n")
    assert request.output_token_ids.tolist() == [8]
    assert scheduler.finish("a", "abort") is None
    assert request.finish_reason == "stop"
