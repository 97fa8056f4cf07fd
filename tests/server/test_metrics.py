"""What Prometheus and people read."""

import asyncio
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.helpers.fake_engine import FakeEngine, ask, asked, fake_app

from rackmount import ExpertLoad, SamplingParams, Sequence, TextChunk
from rackmount.engine.core import Event
from rackmount_server.metrics import LOAD_AGE_S, Metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
PATH = "/v1/completions"


def samples(text: str) -> dict[str, float]:
    """By name; labels do not matter."""
    families = text_string_to_metric_families(text)
    found = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "m" for sample in found)
    return {sample.name: sample.value for sample in found}


def served(engine: FakeEngine, *bodies: dict[str, Any]) -> dict[str, float]:
    """Metrics after these completions, one after another."""

    async def run() -> str:
        app = fake_app(engine)
        for body in bodies:
            await asked(app, PATH, {"prompt": "A", "max_tokens": 4} | body)
        return (await asked(app, "/metrics")).text

    return samples(asyncio.run(run()))


def test_an_answer_is_counted_once() -> None:
    found = served(FakeEngine(), {}, {"stream": True, "prompt": "AAA"})
    assert found["rackmount:prompt_tokens_total"] == 4
    assert found["rackmount:generation_tokens_total"] == 8
    assert found["rackmount:request_success_total"] == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert found[f"rackmount:{name}_seconds_count"] == 2
    assert found["rackmount:request_queue_time_seconds_sum"] == 0.5
    assert found["rackmount:request_prefill_time_seconds_sum"] == 1.0


def test_answers_to_one_prompt_count_it_once() -> None:
    found = served(FakeEngine(), {"n": 3, "prompt": "AA"})
    assert found["rackmount:prompt_tokens_total"] == 2
    assert found["rackmount:time_to_first_token_seconds_count"] == 3


def test_a_first_token_is_timed_from_the_arrival_of_the_request() -> None:
    async def run() -> str:
        engine = FakeEngine()
        engine.go.clear()
        app = fake_app(engine)
        waiting = asyncio.ensure_future(asked(app, PATH, {"prompt": "A", "max_tokens": 2}))
        await asyncio.sleep(0.2)
        engine.go.set()
        await waiting
        return (await asked(app, "/metrics")).text

    found = samples(asyncio.run(run()))
    first, whole = (
        found[f"rackmount:{name}_seconds_sum"]
        for name in ("time_to_first_token", "e2e_request_latency")
    )
    assert 0.15 <= first <= whole < 5  # it takes a moment to arrive


def test_gaps_between_tokens_are_those_of_their_coming_not_of_their_reading() -> None:
    """Three tokens that come 0, 50 and 10 ms after one another and are read as one chunk."""
    metrics = Metrics(fake_engine := FakeEngine(), "m")
    sequence = Sequence("0", 0, 0, [65], SamplingParams(max_tokens=3), fake_engine.tokenizer)
    chunks: list[TextChunk] = []
    sequence.sink = chunks.append
    watch = metrics.watch(sequence)
    for token_id, wait in ((66, 0), (67, 0.05), (68, 0.01)):
        time.sleep(wait)
        sequence.take(Event(request_id="0", token_id=token_id, queue_s=0.1, prefill_s=0.2))
    time.sleep(0.3)
    for chunk in chunks:
        watch.take(chunk)
    found = samples(metrics.text().decode())
    assert found["rackmount:inter_token_latency_seconds_count"] == 2
    assert 0.06 <= found["rackmount:inter_token_latency_seconds_sum"] < 0.2


def test_the_schedulers_figures_are_the_cores() -> None:
    engine = FakeEngine()
    engine.stats.num_running, engine.stats.kv_usage = 3, 0.5
    engine.stats.total_preemptions, engine.stats.total_prefix_hits = 4, 5
    found = served(engine)
    assert found["rackmount:num_requests_running"] == 3
    assert found["rackmount:kv_cache_usage_perc"] == 0.5
    assert found["rackmount:num_preemptions_total"] == 4
    assert found["rackmount:prefix_cache_hits_total"] == 5
    assert found["rackmount:engine_up"] == 1


def expert_metrics(engine: FakeEngine, **settings: Any) -> dict[tuple[str, ...], float]:
    """Those of experts, by name, layer and expert."""
    text = ask(fake_app(engine, **settings), "/metrics").text
    return {
        (
            sample.name.removeprefix("rackmount:"),
            *(sample.labels[name] for name in ("layer", "expert") if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "expert" in sample.name
    }


def test_layers_of_experts_are_told_and_single_experts_when_asked_for() -> None:
    engine = FakeEngine()
    assert expert_metrics(engine) == {}
    engine.description["expert_layers"] = ["a", "b"]
    engine.loads = [
        ExpertLoad("a", np.array([6, 0, 2, 0])),
        ExpertLoad("b", np.array([2, 2, 2, 2])),
    ]
    layers = {
        ("expert_imbalance", "a"): 3.0,
        ("expert_imbalance", "b"): 1.0,
        ("experts_used", "a"): 2.0,
        ("experts_used", "b"): 4.0,
    }
    assert expert_metrics(engine) == layers
    assert expert_metrics(engine, expert_metrics=True) == layers | {
        ("expert_tokens_total", each.layer, str(expert)): float(count)
        for each in engine.loads
        for expert, count in enumerate(each.tokens)
    }


def test_a_core_that_does_not_answer_holds_no_metrics_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rackmount_server.metrics.LOAD_PATIENCE_S", 0.1)
    monkeypatch.setattr("rackmount_server.metrics.LOAD_AGE_S", 0)

    async def run() -> list[str]:
        engine = FakeEngine()
        engine.description["expert_layers"] = ["a"]
        engine.loads = [ExpertLoad("a", np.array([1, 3]))]
        app = fake_app(engine)
        texts = []
        for happens in (lambda: None, engine.go.clear, lambda: engine.die("gone")):
            happens()
            texts.append((await asked(app, "/metrics")).text)
        return texts

    for text in asyncio.run(run()):
        assert 'rackmount:expert_imbalance{layer="a",model_name="m"} 1.5' in text


def test_the_core_is_asked_once_at_a_time_and_not_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time it waits for the steps in flight."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("rackmount_server.metrics.time", clock)

    async def run() -> list[int]:
        engine = CountingEngine()
        engine.description["expert_layers"] = ["a"]
        engine.loads = [ExpertLoad("a", np.array([1, 3]))]
        app, num_asked = fake_app(engine), []
        engine.go.clear()
        waiting = [asyncio.ensure_future(asked(app, "/metrics")) for _ in range(3)]
        await asyncio.sleep(0.1)
        waiting[0].cancel()  # who asked first is gone
        await asyncio.sleep(0.1)
        engine.go.set()
        for each in waiting[1:]:
            assert 'rackmount:expert_imbalance{layer="a",model_name="m"} 1.5' in (await each).text
        num_asked.append(engine.num_asked)
        await asked(app, "/metrics")
        num_asked.append(engine.num_asked)
        clock.now += LOAD_AGE_S
        await asked(app, "/metrics")
        num_asked.append(engine.num_asked)
        return num_asked

    assert asyncio.run(run()) == [1, 1, 2]


class CountingEngine(FakeEngine):
    """Counts how often the experts' load was asked for."""

    num_asked = 0

    async def expert_load(self) -> list[ExpertLoad]:
        self.num_asked += 1
        return await super().expert_load()


def test_people_get_percentiles_of_the_latest() -> None:
    async def run() -> Any:
        app = fake_app(FakeEngine())
        assert (await asked(app, "/server_info")).json()["latencies"] == {}
        await asked(app, PATH, {"prompt": "A"})
        return (await asked(app, "/server_info")).json()["latencies"]

    latencies = asyncio.run(run())
    assert latencies["request_queue_time_seconds"] == {"p50": 0.25, "p90": 0.25, "p99": 0.25}


def test_two_applications_count_apart() -> None:
    assert served(FakeEngine(), {}, {})["rackmount:request_success_total"] == 2
    assert served(FakeEngine(), {})["rackmount:request_success_total"] == 1


def test_the_dashboard_asks_for_nothing_that_is_not_there() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    engine = FakeEngine()
    engine.description["expert_layers"] = ["a"]
    engine.loads = [ExpertLoad("a", np.array([1, 0]))]
    text = ask(fake_app(engine), "/metrics").text
    there = set(re.findall(r"^rackmount:\w+", text, re.MULTILINE))
    there |= set(re.findall(r"^# TYPE (rackmount:\w+)", text, re.MULTILINE))
    asked_for = set(re.findall(r"rackmount:\w+", json.dumps(dashboard)))
    assert asked_for
    assert asked_for <= there | {"rackmount:request_success_total"}  # has a label for each reason
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
