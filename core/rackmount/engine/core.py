"""The engine core: scheduler and executor, step by step, in token ids alone."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rackmount.execution.expert_load import ExpertLoad
from rackmount.execution.messages import (
    MAX_IN_FLIGHT,
    Carve,
    Load,
    RankSetup,
    ReadExpertLoad,
    StepResult,
)
from rackmount.execution.program import Live
from rackmount.execution.saturation import misfits, worst
from rackmount.sampling.request import TokenLogprobs
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.plan import StepPlan
from rackmount.scheduling.request import FinishReason, Request
from rackmount.scheduling.scheduler import Scheduler
from rackmount.scheduling.step_output import SchedulerStats, StepOutput
from rackmount_registry.errors import RequestError
from rackmount_registry.executor import Executor, Launch, RankError
from rackmount_registry.options import instantiate

_log = logging.getLogger(__name__)


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """What a step did for one request."""

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[int, list[TokenLogprobs]] | None = None
    """Position of the first prompt token that they are of, and one for each from there."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    """With the first token: seconds until the request first ran, and from there to the token."""


class EngineCore:
    """Schedules, executes, updates: with `depth` 2, a step is scheduled while the one before it
    runs. What is in flight for requests that have ended is dropped when it comes."""

    def __init__(self, path: Path, live: Live) -> None:
        rack = live.rack
        config = rack.config
        launch = Launch(
            program="rackmount.execution.program:RankProgram",
            codec="rackmount.execution.codec:MessageCodec",
            payload=RankSetup(config=config, path=str(path), manifest=live.manager.manifest()),
            live=live,
            num_ranks=rack.num_ranks,
            device=str(rack.device),
        )
        self.executor: Executor = instantiate(rack.executor, rack.options, launch)
        try:
            loaded = self.executor.call(Load())
            self.weight_bytes_read = sum(each.weight_bytes_read for each in loaded)
            self.num_kv_blocks = min(each.num_kv_blocks for each in loaded)
            carved = self.executor.call(Carve(num_kv_blocks=self.num_kv_blocks))
            self.kv_bytes = sum(each.kv_bytes for each in carved)
            self.saturation = worst([each.saturation for each in carved])
            self.num_tried = carved[0].num_tried
            for wrong in misfits(self.saturation, self.num_tried):
                _log.warning(wrong)
        except BaseException:
            self.executor.close()
            raise
        self.limits = SchedulerConfig(
            num_blocks=self.num_kv_blocks,
            block_size=rack.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=rack.max_model_len,
            vocab_size=rack.draft.vocab_size,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy="priority" if config.scheduling_policy == "priority" else "fcfs",
            enable_prefix_caching=config.enable_prefix_caching,
            enable_mixed_steps=config.mixes_steps,
        )
        self.scheduler = Scheduler(self.limits)
        ahead = config.async_scheduling
        ahead = rack.device.type == "cuda" if ahead is None else ahead
        self.depth = MAX_IN_FLIGHT if ahead else 1
        """Most steps in flight."""
        self._in_flight: deque[StepPlan] = deque()
        """Submitted and not collected, oldest first."""
        self.events: deque[Event] = deque()
        """What steps did, oldest first, for whoever drives the core to take."""
        self._down: RankError | None = None
        self.expert_layers = [layer.path for layer in rack.draft.experts]
        """Those that have experts."""

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    def add(self, request: Request) -> None:
        """Queues a request, whose id is never used again. RequestError for one that can never run,
        RankError where no rank is left."""
        if self._down:
            raise RankError(self._down.rank, f"the engine is down: {self._down}")
        with self._restarting():
            self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request that nobody waits for. Unknown ids are done already. Waits for nothing:
        steps in flight give its blocks back as they end."""
        with self._restarting():
            self.scheduler.finish(request_id, "abort")

    def step(self) -> bool:
        """Submits steps up to the depth and ends the oldest, whose events are added to `events`;
        False when there is nothing to do.

        Where the model raises, the requests that it ran end as "error"; the steps behind that one
        end too, and the others go on. An interrupt while the model runs ends as "error" whatever
        is in flight. With a RankError all end, and the core takes no more.
        """
        with self._restarting():
            failure = self._submit()
            if self._in_flight:
                failure = self._collect()
                while failure and self._in_flight:
                    later = self._collect()
                    if later and not isinstance(later, Exception):
                        failure = later  # an interrupt is told first, other trouble once
            elif not failure:
                assert not self.scheduler.has_requests, "requests wait, and nothing can run"
                return False
        if failure:
            raise failure
        return True

    def settle(self) -> None:
        """Ends the steps in flight, and begins none. Raises as `step` does."""
        failure: BaseException | None = None
        with self._restarting():
            while self._in_flight:
                later = self._collect()
                failure = failure or later
        if failure:
            raise failure

    def expert_load(self) -> list[ExpertLoad]:
        """Of each layer with experts, the steps in flight included, which it ends."""
        if not self.expert_layers:
            return []
        self.settle()
        self.executor.forget()  # what an interrupt has left there
        layers: list[ExpertLoad] = self.executor.call(ReadExpertLoad())[0].layers
        return layers

    def _submit(self) -> BaseException | None:
        """Fills the depth with steps. Gives the interrupt that emptied it, if one came."""
        if not self._in_flight:
            self.executor.forget()  # what an interrupt has left there
        while len(self._in_flight) < self.depth and (plan := self.scheduler.schedule()):
            self._in_flight.append(plan)
            try:
                self.executor.submit(plan)
            except BaseException as error:
                return self._lose(error)
        return None

    def _collect(self) -> BaseException | None:
        """Ends the oldest step in flight. Gives what its model raised, or the interrupt."""
        try:
            result: StepResult = self.executor.collect()
        except RankError as error:
            return self._lose(error)
        except Exception as error:
            self._fail()
            return error
        except BaseException as error:
            return self._lose(error)
        for request_id in result.failed:
            if self.scheduler.finish(request_id, "error"):
                self.events.append(_error(request_id))
        output = self.scheduler.update(self._in_flight.popleft(), result.token_ids)
        self.events.extend(self._events(output, result))
        return None

    def _lose(self, error: BaseException) -> BaseException:
        """Ends all steps in flight: their answers will not be collected."""
        if isinstance(error, RankError):
            self._down = error
            raise error
        while self._in_flight:
            self._fail()
        return error

    def _fail(self) -> None:
        """Ends the oldest step in flight, which broke, and its requests."""
        failed = self.scheduler.fail(self._in_flight.popleft())
        self.events.extend(_error(each.request_id) for each in failed)

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """An interrupt within may leave the scheduler halfway: then all requests end as "error",
        and the core starts anew with an empty prefix cache. A refusal changes nothing."""
        try:
            yield
        except RequestError:
            raise
        except BaseException:
            self._in_flight = deque()
            lost, before = self.scheduler.request_ids, self.scheduler.totals
            self.scheduler = Scheduler(self.limits, before)
            self.events.extend(map(_error, lost))
            raise

    def close(self) -> None:
        """Ends the ranks, whatever is in flight."""
        self.executor.close()

    def _events(self, output: StepOutput, result: StepResult) -> Iterator[Event]:
        prompts, now = result.prompt_logprobs, time.monotonic()
        for request, token_id in zip(output.requests, output.token_ids.tolist(), strict=True):
            name = request.request_id
            started, request.started_at = request.started_at, None
            yield Event(
                request_id=name,
                token_id=token_id,
                logprobs=result.logprobs.get(name),
                prompt_logprobs=prompts.pop(name, None),
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                num_cached_tokens=request.num_cached_tokens or 0,
                queue_s=None if started is None else started - request.queued_at,
                prefill_s=None if started is None else now - started,
            )
        for name, piece in prompts.items():
            if self.scheduler.has(name):
                yield Event(request_id=name, prompt_logprobs=piece)


def _error(request_id: str) -> Event:
    return Event(request_id=request_id, finish_reason="error")
