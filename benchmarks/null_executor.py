"""A plugin for benchmarks: an executor without ranks, whose steps take as long as they are told.

Tokens are random ids of a fixed range, so that a tokenizer has text to write.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from rackmount.execution.messages import Carve, Carved, Load, Loaded, StepResult
from rackmount.scheduling.plan import StepPlan
from rackmount_registry import hookimpl
from rackmount_registry.descriptors import Executor
from rackmount_registry.executor import Launch

NUM_KV_BLOCKS = 2**16
FIRST_ID, LAST_ID = 300, 10_000


@hookimpl
def executors() -> list[Executor]:
    return [
        Executor(name="null", factory="null_executor:NullExecutor", options="null_executor:Options")
    ]


@dataclass(frozen=True, kw_only=True)
class Options:
    step_ms: float = 0.0
    """From one step's result to the next's."""


class NullExecutor:
    """A `rackmount_registry.executor.Executor`."""

    def __init__(self, launch: Launch, *, options: Options) -> None:
        self._step_s = options.step_ms / 1e3
        self._due = 0.0
        self._plans: deque[StepPlan] = deque()
        self._num_steps = 0
        random = np.random.default_rng(0)
        self._tokens = random.integers(FIRST_ID, LAST_ID, 1 << 16, dtype=np.int32)

    def call(self, request: Any) -> list[Any]:
        if isinstance(request, Load):
            return [Loaded(num_kv_blocks=NUM_KV_BLOCKS, weight_bytes_read=0)]
        assert isinstance(request, Carve), request
        return [Carved(kv_bytes=0)]

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        if self._step_s:
            self._due = max(self._due + self._step_s, time.monotonic())
            time.sleep(max(0.0, self._due - time.monotonic()))
        self._num_steps += 1
        first = 37 * self._num_steps % (1 << 15)
        return StepResult(token_ids=self._tokens[first : first + np.count_nonzero(plan.samples)])

    def forget(self) -> None:
        self._plans.clear()

    def close(self) -> None:
        self._plans.clear()
