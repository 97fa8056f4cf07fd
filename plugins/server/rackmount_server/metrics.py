"""What Prometheus reads, and the latest latencies for people.

All times are differences of this process's monotonic clock, or durations that the core measured.
The first token's time counts from the arrival of the request; what preemption costs is inside.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rackmount import AsyncEngine, ExpertLoad, Sequence, TextChunk
from rackmount_registry.errors import RackmountError

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", LONG),
    "inter_token_latency_seconds": ("Between tokens of an answer, as they came.", SHORT),
    "request_time_per_output_token_seconds": ("Mean of an answer after its first token.", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", LONG),
    "request_queue_time_seconds": ("Before an answer was first scheduled.", LONG),
    "request_prefill_time_seconds": ("From the first schedule to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the last.", LONG),
}
LOAD_PATIENCE_S = 2.0
"""How long the experts' load may take to come, which it does between two steps."""
LOAD_AGE_S = 5.0
"""For how long it is told again without asking: each time the core is asked, the steps in flight
are waited for, and a step's worth of time on the device is lost."""
RECENT = 512
"""Latencies of each kind that percentiles are taken of."""


class Metrics:
    """Watches the chunks of all answers."""

    def __init__(self, engine: AsyncEngine, model_name: str, *, each_expert: bool = False) -> None:
        """`each_expert`: a counter for every expert of every layer, and not for layers alone."""
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))
        self._engine, self._experts = engine, _ExpertCollector(model_name, each_expert)
        self.registry.register(self._experts)
        self._reading: asyncio.Task[None] | None = None
        self._next_reading_at = 0.0
        self._times: dict[str, Histogram] = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            family = Histogram(
                f"rackmount:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            )
            self._times[name] = family.labels(model_name)
        self._prompt_tokens, self._generation_tokens = (
            Counter(f"rackmount:{name}", text, ["model_name"], registry=self.registry).labels(
                model_name
            )
            for name, text in (
                ("prompt_tokens", "Tokens of prompts whose answers began."),
                ("generation_tokens", "Tokens sampled for answers."),
            )
        )
        self._ends = Counter(
            "rackmount:request_success",
            "Answers that ended, by their reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._model_name = model_name
        self._recent = {name: deque[float](maxlen=RECENT) for name in HISTOGRAMS}

    def watch(self, sequence: Sequence) -> "Watch":
        """For an answer that was just asked for."""
        return Watch(self, sequence)

    def observe(self, name: str, seconds: float | None) -> None:
        """A latency; None is of no interest."""
        if seconds is not None:
            self._times[name].observe(seconds)
            self._recent[name].append(seconds)

    def count(self, num_prompt_tokens: int, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc(num_tokens)

    def count_end(self, reason: str) -> None:
        self._ends.labels(self._model_name, reason).inc()

    async def refresh(self) -> None:
        """Asks the core for what it tells when asked alone, unless it told lately; whoever comes
        while it is being asked waits for the same answer. Where it does not answer in time, or no
        more, what it told last stays."""
        if not self._engine.description["expert_layers"]:
            return
        reading = self._reading
        if reading is None or (reading.done() and time.monotonic() >= self._next_reading_at):
            reading = self._reading = asyncio.create_task(self._read_load())
        done, _ = await asyncio.wait([reading], timeout=LOAD_PATIENCE_S)
        for each in done:
            each.result()

    async def _read_load(self) -> None:
        with suppress(RackmountError):
            self._experts.layers = await self._engine.expert_load()
        self._next_reading_at = time.monotonic() + LOAD_AGE_S

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Of the latest latencies, in seconds."""
        known = {name: list(values) for name, values in self._recent.items() if values}
        return {
            name: {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
            for name, values in known.items()
        }


class Watch:
    """Tells the metrics of one answer."""

    def __init__(self, metrics: Metrics, sequence: Sequence) -> None:
        self.sequence = sequence
        self._metrics = metrics
        self._gaps: list[float] = []
        self._has_begun = self._ended = False
        sequence.gaps = self._gaps

    def take(self, chunk: TextChunk) -> None:
        """A chunk that came now."""
        if num_tokens := len(chunk.token_ids):
            if not self._has_begun:
                self._has_begun = True
                self._begin()
            for gap in self._gaps:  # as tokens came, whenever the client reads them
                self._metrics.observe("inter_token_latency_seconds", gap)
            self._gaps.clear()
            self._metrics.count(0, num_tokens)
        if chunk.finish_reason is not None:
            self._end(chunk.finish_reason)

    def close(self) -> None:
        """Nobody waits for it any more."""
        if not self._ended:
            self._end("abort")

    def _begin(self) -> None:
        sequence, observe = self.sequence, self._metrics.observe
        if sequence.index == 0:
            self._metrics.count(len(sequence.prompt_token_ids), 0)
        assert sequence.first_token_at is not None
        observe("time_to_first_token_seconds", sequence.first_token_at - sequence.arrived_at)
        observe("request_queue_time_seconds", sequence.queue_s)
        observe("request_prefill_time_seconds", sequence.prefill_s)

    def _end(self, reason: str) -> None:
        self._ended = True
        self._metrics.count_end(reason)
        sequence, observe = self.sequence, self._metrics.observe
        first, last = sequence.first_token_at, sequence.last_token_at
        if reason not in ("stop", "length") or first is None or last is None:
            return
        observe("e2e_request_latency_seconds", last - sequence.arrived_at)
        observe("request_decode_time_seconds", last - first)
        if (more := len(sequence.token_ids) - 1) > 0:
            observe("request_time_per_output_token_seconds", (last - first) / more)


class _EngineCollector(Collector):
    """The scheduler's figures, as the core last sent them."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._labels = engine, [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, text, value in (
            ("num_requests_running", "Answers in the running batch.", stats.num_running),
            ("num_requests_waiting", "Answers that wait to be scheduled.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", stats.kv_usage),
            ("engine_up", "1 while the engine lives.", float(self._engine.is_alive)),
        ):
            gauge = GaugeMetricFamily(f"rackmount:{name}", text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Preemptions.", stats.total_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.total_prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.total_prefix_hits),
            ("computed_tokens", "Tokens put through the model.", stats.total_computed_tokens),
        ):
            counter = CounterMetricFamily(f"rackmount:{name}", text, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter


class _ExpertCollector(Collector):
    """How busy the experts were, as the core last told."""

    def __init__(self, model_name: str, each_expert: bool) -> None:
        self._model_name, self._each_expert = model_name, each_expert
        self.layers: list[ExpertLoad] = []

    def collect(self) -> Iterator[Metric]:
        if not self.layers:
            return
        for name, text, value_of in (
            ("expert_imbalance", "Tokens of a layer's busiest expert over the mean.", _imbalance),
            ("experts_used", "Experts of a layer that any token chose.", _num_used),
        ):
            gauge = GaugeMetricFamily(f"rackmount:{name}", text, labels=["model_name", "layer"])
            for each in self.layers:
                gauge.add_metric([self._model_name, each.layer], value_of(each))
            yield gauge
        if self._each_expert:
            counter = CounterMetricFamily(
                "rackmount:expert_tokens",
                "Tokens that chose an expert.",
                labels=["model_name", "layer", "expert"],
            )
            for each in self.layers:
                for expert, count in enumerate(each.tokens.tolist()):
                    counter.add_metric([self._model_name, each.layer, str(expert)], count)
            yield counter


def _imbalance(load: ExpertLoad) -> float:
    return load.imbalance


def _num_used(load: ExpertLoad) -> float:
    return load.num_used
