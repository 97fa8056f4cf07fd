"""The engine core: scheduler and executor, step by step, in token ids alone."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rackmount.execution.messages import Carve, Load, RankSetup, StepResult
from rackmount.execution.program import Live
from rackmount.sampling.request import TokenLogprobs
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.request import FinishReason, Request
from rackmount.scheduling.scheduler import Scheduler
from rackmount.scheduling.step_output import SchedulerStats, StepOutput
from rackmount_registry.errors import RequestError
from rackmount_registry.executor import Executor, Launch, RankError
from rackmount_registry.options import instantiate


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a step did for one request."""

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[int, list[TokenLogprobs]] | None = None
    """Position of the first prompt token that they are of, and one for each from there."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0


class EngineCore:
    """Schedules, executes, updates. One call of `step` is one forward of the model."""

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
        except BaseException:
            self.executor.close()
            raise
        self._limits = SchedulerConfig(
            num_blocks=self.num_kv_blocks,
            block_size=rack.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=rack.max_model_len,
            vocab_size=rack.draft.vocab_size,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy="priority" if config.scheduling_policy == "priority" else "fcfs",
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(self._limits)
        self.events: deque[Event] = deque()
        """What steps did, oldest first, for whoever drives the core to take."""
        self._down: RankError | None = None

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    def add(self, request: Request) -> None:
        """Queues a request. RequestError for one that can never run, RankError where no rank is
        left."""
        if self._down:
            raise RankError(self._down.rank, f"the engine is down: {self._down}")
        with self._restarting():
            self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request that nobody waits for. Unknown ids are done already."""
        with self._restarting():
            self.scheduler.finish(request_id, "abort")

    def step(self) -> bool:
        """One step, whose events are added to `events`; False when there is nothing to do.

        Where the model raises, or is interrupted, the requests that it ran end as "error" and the
        others go on; with a RankError all requests end so, and the core takes no more.
        """
        failure: BaseException | None = None
        with self._restarting():
            plan = self.scheduler.schedule()
            if plan is None:
                assert not self.scheduler.has_requests, "requests wait, and nothing can run"
                return False
            try:
                result: StepResult = self.executor.step(plan)
            except BaseException as error:
                failure = error
                failed = self.scheduler.fail(plan)
                if isinstance(error, RankError):
                    self._down = error
                    failed += self.scheduler.finish_all("error")
                self.events.extend(_error(each.request_id) for each in failed)
            else:
                for request_id in result.failed:
                    self.scheduler.finish(request_id, "error")
                output = self.scheduler.update(plan, result.token_ids)
                self.events.extend(self._events(output, result))
        if failure is not None:
            raise failure
        return True

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """An interrupt within may leave the scheduler halfway: then all requests end as "error",
        and the core starts anew with an empty prefix cache. A refusal changes nothing."""
        try:
            yield
        except RequestError:
            raise
        except BaseException:
            lost, self.scheduler = self.scheduler.request_ids, Scheduler(self._limits)
            self.events.extend(map(_error, lost))
            raise

    def close(self) -> None:
        """Ends the ranks."""
        self.executor.close()

    def _events(self, output: StepOutput, result: StepResult) -> list[Event]:
        ended = {request.request_id for request in output.finished}
        prompts = dict(result.prompt_logprobs)
        events = [_error(name) for name in result.failed]
        for request, token_id in zip(output.requests, output.token_ids.tolist(), strict=True):
            name = request.request_id
            events.append(
                Event(
                    request_id=name,
                    token_id=token_id,
                    logprobs=result.logprobs.get(name),
                    prompt_logprobs=prompts.pop(name, None),
                    finish_reason=request.finish_reason if name in ended else None,
                    stop_reason=request.stop_reason,
                    num_cached_tokens=request.num_cached_tokens or 0,
                )
            )
        events += [Event(request_id=name, prompt_logprobs=piece) for name, piece in prompts.items()]
        return events


def _error(request_id: str) -> Event:
    return Event(request_id=request_id, finish_reason="error")
