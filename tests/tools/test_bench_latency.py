"""The arithmetic of latencies, against engines and clocks whose times are known."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rackmount import Completion, RequestOutput, TextChunk
from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_registry.experts import RouterState
from rackmount_registry.nn import Axis, Experts, Routing
from rackmount_tools.bench_interference import measure as measure_interference
from rackmount_tools.bench_interference import warm_up
from rackmount_tools.bench_latency import measure, measure_steady, numbers_of, ramp_len
from rackmount_tools.clocks import DeviceClock, HostClock, clock_of_steps
from rackmount_tools.experts_touched import distinct_experts

PREFILL_S, STEP_S = 2.0, 0.25
PROMPTS = [[1, 2, 3]] * 4


class Timeline:
    """A clock that stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Prefills one prompt a step, together with those that decode already; every step has its
    time."""

    def __init__(self, timeline: Timeline, finish_reason: str = "length") -> None:
        self.timeline = timeline
        self.finish_reason = finish_reason
        self.asked: list[int] = []
        self.loads: list[tuple[int, list[int]]] = []
        """Prompts, and tokens of each answer."""
        self.total_computed_tokens = 0

    @property
    def stats(self) -> "FakeEngine":
        return self

    def generate(self, prompts: Any, params: Any) -> list[RequestOutput]:
        if isinstance(params, list):
            self.loads.append((len(prompts), [one.max_tokens for one in params]))
            params = params[0]
        self.asked.append(params.max_tokens)
        self.timeline.now += PREFILL_S + STEP_S * (params.max_tokens - 1)
        answer = Completion(
            index=0, text="", token_ids=[0] * params.max_tokens, finish_reason=self.finish_reason
        )
        return [RequestOutput(prompt_token_ids=p, completions=[answer]) for p in prompts]

    def stream(self, prompts: Any, params: Any) -> Iterator[TextChunk]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        left, begun = [one.max_tokens for one in each], 0
        while any(left):
            if begun < len(prompts):
                self.timeline.now += PREFILL_S
                self.total_computed_tokens += len(prompts[begun])
                begun += 1
            running = [i for i in range(begun) if left[i]]
            self.timeline.now += STEP_S * len(running)
            self.total_computed_tokens += len(running)
            for index in running:
                left[index] -= 1
                yield TextChunk(
                    prompt_index=index,
                    index=0,
                    text="",
                    token_ids=[0],
                    num_prompt_tokens=len(prompts[index]),
                    num_cached_tokens=0,
                    finish_reason=None if left[index] else "length",
                )


class Marks(HostClock):
    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline

    def mark(self) -> None:
        self._marks.append(self._timeline.now)


def test_a_step_is_the_difference_of_129_tokens_and_one_over_128() -> None:
    timeline = Timeline()
    engine: Any = FakeEngine(timeline)
    times = measure(engine, PROMPTS, 128, 3, lambda: engine.asked.append(0), timeline)
    assert engine.asked == [0, 1, 0, 129] * 3
    assert (times.prefill, times.step) == (PREFILL_S, STEP_S)


def test_an_answer_that_was_cut_short_is_not_timed() -> None:
    timeline = Timeline()
    engine: Any = FakeEngine(timeline, finish_reason="error")
    with pytest.raises(RackmountError, match="ended by 'error' after 1 tokens"):
        measure(engine, PROMPTS, 8, 1, lambda: None, timeline)


def test_steady_steps_are_those_in_which_all_decode() -> None:
    timeline = Timeline()
    engine: Any = FakeEngine(timeline)
    steady = measure_steady(engine, PROMPTS, 10, Marks(timeline))
    assert steady is not None
    # The last of 4 begins in the 4th step, the first ends in the 10th: steps 5 to 9 are whole.
    assert (steady.step, steady.count) == (4 * STEP_S, 5)
    # The first answers have 4, 3, 2 and 1 tokens then, and 9, 8, 7 and 6 after the 9th step.
    assert steady.context == 3 + 5


def test_without_two_whole_steps_there_is_no_steady_time() -> None:
    timeline = Timeline()
    engine: Any = FakeEngine(timeline)
    assert measure_steady(engine, PROMPTS, 4, Marks(timeline)) is None


@pytest.mark.parametrize(
    ("batch", "budget", "steps"), [(1, 2048, 1), (16, 2048, 9), (256, 2048, 147), (64, 32, 65536)]
)
def test_the_ramp_is_bounded_by_what_decoding_leaves_of_the_budget(
    batch: int, budget: int, steps: int
) -> None:
    assert ramp_len(batch, 1024, budget) == steps + 2


@pytest.mark.parametrize(
    ("device", "executor", "clock"),
    [
        ("cuda", "in-process", DeviceClock),
        ("cuda", "multiprocess", HostClock),
        ("cpu", "in-process", HostClock),
    ],
)
def test_steps_in_other_processes_are_timed_by_the_host(
    device: str, executor: str, clock: type[HostClock] | type[DeviceClock]
) -> None:
    rack = SimpleNamespace(device=torch.device(device), executor=SimpleNamespace(name=executor))
    engine: Any = SimpleNamespace(rack=rack)
    assert type(clock_of_steps(engine)) is clock
    assert clock.name == ("device" if clock is DeviceClock else "host")


def test_batch_sizes_are_numbers() -> None:
    assert numbers_of("1,16, 64", "tokens") == [1, 16, 64]
    for wrong in ("", "1,,2", "0", "many"):
        with pytest.raises(ConfigError, match="tokens="):
            numbers_of(wrong, "tokens")


def test_gaps_are_of_those_who_decode_while_long_prompts_are_prefilled() -> None:
    timeline = Timeline()
    engine: Any = FakeEngine(timeline)
    alone = measure_interference(engine, PROMPTS[:2], 8, [], timeline)
    assert set(alone.gaps) == {2 * STEP_S}
    beside = measure_interference(engine, PROMPTS[:2], 8, [[0] * 50] * 20, timeline)
    # A long prompt's step has a prefill and three tokens.
    assert set(beside.gaps) == {PREFILL_S + 3 * STEP_S}
    assert len(beside.gaps) == 2 * 5 - 1  # the step that ends the first is not taken in whole
    steps = beside.seconds / (PREFILL_S + 3 * STEP_S)
    assert beside.computed == steps * (50 + 3)
    # Prompts of 3; at first 2 and 1 tokens of answers, at last 8 and 6.
    assert (alone.context, beside.context) == (3 + 4, 3 + 4)


def test_all_who_decode_and_long_prompts_have_run_before_they_are_measured() -> None:
    engine: Any = FakeEngine(Timeline())
    warm_up(engine, PROMPTS, 8, [[0] * 50] * 20)
    assert engine.loads == [(4, [8] * 4), (6, [8] * 4 + [1] * 2)]


def test_long_prompts_that_run_out_are_an_error() -> None:
    timeline = Timeline()
    engine: Any = FakeEngine(timeline)
    with pytest.raises(RackmountError, match="all 2 long prompts were done before"):
        measure_interference(engine, PROMPTS[:2], 8, [[0] * 50] * 2, timeline)


def test_latencies_stand_beside_their_floors(record_of: Callable[[str], dict[str, Any]]) -> None:
    record = record_of("latency --batch-sizes 1,3 --input-len 12 --output-len 5 --repeats 1")
    phases = [(row["batch"], row["phase"]) for row in record["phases"]]
    assert phases == [(n, phase) for n in (1, 3) for phase in ("prefill", "step", "steady")]
    for row in record["phases"]:
        assert row["floor_ms"] > 0 and row["clock"] == "host"
        assert row["share"] == pytest.approx(row["floor_ms"] / row["ms"])
        num_tokens = row["batch"] * (12 if row["phase"] == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(num_tokens / row["ms"] * 1e3)
    for row in record["phases"]:
        touched = row.get("distinct_by_layer")  # of 4 experts in one layer, 2 for each token
        assert (touched is None) == (row["phase"] == "prefill")
        assert touched is None or (touched == [2] if row["batch"] == 1 else 2 <= touched[0] <= 4)
    assert record["engine"]["arguments"]["enable_prefix_caching"] is False
    assert {"read_T", "copy_T", "matmul_T"} == set(record["ceilings"])
    assert {"torch", "numpy", "rackmount-core", "processor"} <= set(record["machine"])
    assert "attention_backend: torch" in record["engine"]["parts"]


def test_a_pool_that_is_too_small_is_refused(record_of: Callable[[str], dict[str, Any]]) -> None:
    with pytest.raises(AssertionError, match=r"3 requests .* need \d+ KV blocks .* pool has 2"):
        record_of("latency --batch-sizes 3 --input-len 12 --output-len 5 --num-kv-blocks 2")


class Routed(FakeEngine):
    """Each step routes its tokens to the experts of the next entry."""

    def __init__(self, timeline: Timeline, chosen: list[list[int]]) -> None:
        super().__init__(timeline)
        self.chosen = iter(chosen)
        self.layer = Experts(4, Axis("experts", 8), Axis("expert_ffn", 4), Routing(top_k=2))
        self.layer.state = RouterState.fresh(8, torch.device("cpu"))
        draft = SimpleNamespace(sockets=[self.layer])
        self.rack = SimpleNamespace(draft=draft, executor=SimpleNamespace(name="in-process"))

    def stream(self, prompts: Any, params: Any) -> Iterator[TextChunk]:
        for chunk in super().stream(prompts, params):
            if chunk.prompt_index == 0:  # a step begins
                self.layer.state.load[next(self.chosen)] += 1
            yield chunk


def test_experts_are_counted_in_steps_with_all_requests() -> None:
    # Prompts begin in the first two steps, the first read is of the third, and the first answer
    # ends in the sixth.
    chosen = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3], [2, 3, 4], [5, 6], [7]]
    engine: Any = Routed(Timeline(), chosen)
    assert distinct_experts(engine, PROMPTS[:2], 6) == [(3 + 2) / 2]


def test_without_experts_or_in_other_processes_nothing_is_counted() -> None:
    engine: Any = Routed(Timeline(), [])
    engine.rack.executor.name = "multiprocess"
    assert distinct_experts(engine, PROMPTS, 6) == []
    engine.rack.executor.name, engine.rack.draft.sockets = "in-process", []
    assert distinct_experts(engine, PROMPTS, 6) == []
