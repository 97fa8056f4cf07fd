"""Whatever the load, every request's tokens are those of its run alone."""

import hashlib
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.scheduling import assert_pool_conserved

from rackmount.execution.batch import PersistentBatch
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.plan import StepPlan
from rackmount.scheduling.request import Request, RequestState
from rackmount.scheduling.scheduler import Scheduler

VOCAB_SIZE = 5


def fingerprint(before: int, token_id: int) -> int:
    """The fake key and value of a token: like real ones, they depend on all tokens before it."""
    return (before * 6364136223846793005 + token_id + 1) % (2**61 - 1)


def next_token(fingerprints: np.ndarray) -> int:
    """The fake model: any change anywhere in the context changes what comes next."""
    digest = hashlib.sha256(np.asarray(fingerprints, np.int64).tobytes()).digest()
    return digest[0] % VOCAB_SIZE


class FakeWorker:
    """Knows of a context only what it finds in the cache, by block table and slot mapping."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.batch = PersistentBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
        )
        self.cache = np.zeros(config.num_kv_tokens, np.int64)

    def run(self, plan: StepPlan) -> np.ndarray:
        self.batch.apply(plan)
        flat = self.batch.build(plan)
        assert len(set(flat.slots.tolist())) == plan.total_num_tokens
        sampled = []
        for index, (begin, end) in enumerate(pairwise(flat.query_start_loc.tolist())):
            positions = np.arange(flat.seq_lens[index])
            table = self.batch.block_table[flat.rows[index]]
            slots = table[positions // self.block_size] * self.block_size
            slots += positions % self.block_size
            for token in range(begin, end):
                position = flat.positions[token]
                before = int(self.cache[slots[position - 1]]) if position else 0
                value = fingerprint(before, int(flat.token_ids[token]))
                self.cache[flat.slots[token]] = value
            assert position == positions[-1]
            if plan.samples[index]:
                assert flat.logits_indices[len(sampled)] == end - 1
                assert flat.sample_rows[len(sampled)] == flat.rows[index]
                sampled.append(next_token(self.cache[slots]))
        token_ids = np.array(sampled, np.int32)
        tenancy = self.batch.expect(flat.sample_rows)
        self.batch.fill(flat.sample_rows, flat.sample_positions, token_ids, tenancy)
        return token_ids


@dataclass
class Arrival:
    step: int
    request: Request
    abort_at: int | None


@st.composite
def loads(draw: st.DrawFn) -> tuple[SchedulerConfig, list[Arrival]]:
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(4, 40))
    barely = -(-(max_model_len - 1) // block_size)
    config = SchedulerConfig(
        num_blocks=draw(st.integers(max(1, barely - 2), 3 * barely)),
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 60)),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3, block_size])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.booleans()),
        enable_mixed_steps=draw(st.booleans()),
    )
    stem = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=40, max_size=40))
    longest = min(max_model_len - 1, config.num_kv_tokens)
    arrivals = []
    for index in range(draw(st.integers(1, 10))):
        length = draw(st.integers(1, longest))
        num_shared = draw(st.integers(0, length))
        own = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=length, max_size=length)
        request = Request(
            request_id=str(index),
            prompt_token_ids=np.array(stem[:num_shared] + draw(own)[num_shared:], np.int32),
            max_tokens=draw(st.integers(1, 30)),
            stop_ids=draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
            min_tokens=draw(st.integers(0, 5)),
            priority=draw(st.integers(-1, 1)),
            cache_salt=draw(st.sampled_from([None, "a"])),
            use_cached_prefix=draw(st.booleans()),
        )
        step = draw(st.integers(0, 30))
        arrivals.append(Arrival(step, request, draw(st.none() | st.integers(step, step + 20))))
    return config, arrivals


def tokens_alone(request: Request, config: SchedulerConfig) -> tuple[list[int], str]:
    """What the request yields by the definition of its limits, without any scheduler."""
    context: list[int] = []
    for token_id in request.prompt_token_ids.tolist():
        context.append(fingerprint(context[-1] if context else 0, token_id))
    longest = min(config.max_model_len, config.num_kv_tokens + 1)
    output: list[int] = []
    while True:
        output.append(next_token(np.array(context)))
        context.append(fingerprint(context[-1], output[-1]))
        if output[-1] in request.stop_ids and len(output) >= request.min_tokens:
            return output, "stop"
        if len(output) == request.max_tokens or len(context) == longest:
            return output, "length"


@settings(max_examples=150, deadline=None)
@given(
    load=loads(),
    depth=st.sampled_from([1, 1, 2, 3]),
    resets=st.frozensets(st.integers(0, 60), max_size=2),
)
def test_every_load_gives_every_request_the_tokens_of_its_run_alone(
    load: tuple[SchedulerConfig, list[Arrival]],
    depth: int,
    resets: frozenset[int],
) -> None:
    config, arrivals = load
    scheduler, worker = Scheduler(config), FakeWorker(config)
    in_flight: deque[tuple[StepPlan, np.ndarray]] = deque()
    streamed: dict[str, list[int]] = {arrival.request.request_id: [] for arrival in arrivals}
    aborted: set[str] = set()
    # Each step computes a token of the first in order; a preemption may undo a whole sequence.
    bound = 40 + sum(2 * arrival.request.prompt_token_ids.size + 62 for arrival in arrivals)
    for step in range(bound * depth):
        for arrival in arrivals:
            if arrival.step == step:
                scheduler.add(arrival.request)
        plan = scheduler.schedule()
        if plan is not None:
            assert plan.total_num_tokens == plan.num_tokens.sum()
            assert plan.total_num_tokens <= config.max_num_batched_tokens
            assert len(plan.rows) <= config.max_num_seqs
            in_flight.append((plan, worker.run(plan)))
        for arrival in arrivals:
            if arrival.abort_at == step and scheduler.finish(arrival.request.request_id, "abort"):
                aborted.add(arrival.request.request_id)
        if in_flight and (len(in_flight) >= depth or plan is None):
            output = scheduler.update(*in_flight.popleft())
            for request, token_id in zip(output.requests, output.token_ids, strict=True):
                streamed[request.request_id].append(int(token_id))
        if step in resets:
            scheduler.reset_prefix_cache()
        if step > 30 and not scheduler.has_requests and not in_flight:
            break
    else:
        raise AssertionError(f"{scheduler.stats} after {bound * depth} steps")
    assert_pool_conserved(scheduler.pool)
    assert scheduler.pool.num_free == config.num_blocks
    for arrival in arrivals:
        request = arrival.request
        assert request.state is RequestState.FINISHED
        tokens, reason = tokens_alone(request, config)
        assert request.output_token_ids.tolist() == streamed[request.request_id]
        if request.request_id in aborted:
            assert request.finish_reason == "abort"
            tokens = tokens[: request.output_token_ids.size]
        else:
            assert request.finish_reason == reason
        assert streamed[request.request_id] == tokens
