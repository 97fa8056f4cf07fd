"""A scheduler of small limits, and steps that sample what a test says."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rackmount.scheduling.block_pool import BlockPool
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.plan import StepPlan
from rackmount.scheduling.request import Request, RequestState
from rackmount.scheduling.scheduler import Scheduler
from rackmount.scheduling.step_output import StepOutput


def scheduler_of(**limits: Any) -> Scheduler:
    defaults = {
        "num_blocks": 100,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1000,
        "max_model_len": 200,
        "vocab_size": 1000,
    }
    return Scheduler(SchedulerConfig(**(defaults | limits)))


def request_of(
    request_id: str, prompt: Iterable[int], max_tokens: int = 50, **fields: Any
) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=list(prompt), max_tokens=max_tokens, **fields
    )


def step(scheduler: Scheduler, token_id: int = 1) -> tuple[StepPlan, StepOutput]:
    """One step that samples `token_id` wherever it samples."""
    plan = scheduler.schedule()
    assert plan is not None
    return plan, scheduler.update(plan, np.full(plan.samples.sum(), token_id))


def scheduled(scheduler: Scheduler, plan: StepPlan) -> dict[str, int]:
    """Request id -> tokens of this step, while the plan is in flight."""
    requests = scheduler._table.requests[plan.rows]
    counts = plan.num_tokens.tolist()
    return {request.request_id: n for request, n in zip(requests, counts, strict=True)}


def counts_of_step(scheduler: Scheduler, token_id: int = 1) -> dict[str, int]:
    """One step: request id -> its tokens."""
    plan = scheduler.schedule()
    assert plan is not None
    counts = scheduled(scheduler, plan)
    scheduler.update(plan, np.full(plan.samples.sum(), token_id))
    return counts


def run_alone(scheduler: Scheduler, request: Request, token_ids: Iterable[int]) -> None:
    """Runs a request that samples these tokens until it ends."""
    scheduler.add(request)
    for token_id in token_ids:
        _, output = step(scheduler, token_id)
        if output.finished:
            break
    assert request.state is RequestState.FINISHED and output.finished == [request]
    assert not scheduler.has_requests


def assert_pool_conserved(pool: BlockPool) -> None:
    """Every block is held or on the free list, once; every name leads to its block."""
    free = []
    block = pool._ends.next
    while block is not pool._ends:
        assert block.next.prev is block
        free.append(block.block_id)
        block = block.next
    held = [block.block_id for block in pool.blocks if block.ref_count]
    assert len(free) == pool.num_free
    assert sorted(free + held) == list(range(len(pool.blocks)))
    named = {block.digest: block for block in pool.blocks if block.digest is not None}
    assert named == pool.cached
