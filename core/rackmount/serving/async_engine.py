"""The engine that coroutines call."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rackmount.config import EngineConfig
from rackmount.engine.core import Event
from rackmount.engine.group import Group
from rackmount.engine.intake import Intake
from rackmount.engine.sequence import Sequence
from rackmount.execution.codec import MessageCodec
from rackmount.execution.expert_load import ExpertLoad
from rackmount.execution.messages import RankSetup
from rackmount.loading.locate import locate, open_model
from rackmount.sampling.params import SamplingParams
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.step_output import SchedulerStats
from rackmount.serving import messages
from rackmount.serving.answer import Answer, Outlet
from rackmount.serving.errors import EngineDead, rebuilt
from rackmount.serving.process import CoreProcess
from rackmount.text.prompts import Prompt
from rackmount_registry.checkpoint import Report, silent
from rackmount_registry.errors import RackmountError, RequestError
from rackmount_registry.plugins import PluginManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLL_S = 0.25
"""Between two looks for signs of life."""

MOST_SILENT_POLLS = 32
"""Looks without a sign of life, after which the engine core is taken for stopped: 8 s."""

GRACE_S = 0.5
"""For a process that has said why, or closed its line, to end."""

END_PATIENCE_S = 8.0
"""For the engine core to end by itself when it is let go."""

_log = logging.getLogger(__name__)


class AsyncEngine:
    """An engine whose core is a process of its own: text and token ids here, steps there.

    Made by `start`, and used on the event loop that it was started on. Every request ends in an
    answer or an error: where the core's process dies, all open answers raise `EngineDead`.
    """

    def __init__(self, config: EngineConfig, report: Report) -> None:
        """Starts the process. `start` does the rest."""
        self.config = config
        self._report = report
        self._codec = MessageCodec(messages.FromCore)
        self._intake: Intake
        self.stats = SchedulerStats()
        """The last that the core has told: some of a second old while it is at work."""
        self.failure: str | None = None
        """Why requests are no longer taken; None while they are."""
        self._sequences: dict[str, tuple[Sequence, Outlet]] = {}
        """By request id, until they end."""
        self._waiting: dict[str, int] = {}
        """Of sequences without a token, the length of the prompt."""
        self._resets: deque[asyncio.Future[int]] = deque()
        self._loads: deque[asyncio.Future[list[ExpertLoad]]] = deque()
        self._is_open = True
        self._ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self._core = CoreProcess()
        self._life = asyncio.create_task(self._live())

    @classmethod
    async def start(
        cls,
        model: str | Path,
        *,
        manager: PluginManager | None = None,
        report: Report = silent,
        **arguments: Any,
    ) -> Self:
        """Loads a model.

        Args:
            model, report, arguments: as for `Engine`.
            manager: plugins that the core's process discovers too; None discovers them here.

        Raises:
            TypeError, ConfigError, CheckpointError, SelectionError, PluginError, RankError: as
                `Engine` does, also where the core's process raised it.
            EngineDead: that process died.
        """
        config = EngineConfig.create(model=model, **arguments)
        if config.enable_mixed_steps is None:
            config = replace(config, enable_mixed_steps=True)
        manager = manager or PluginManager.discover()
        form = config.load_format
        path = await asyncio.to_thread(locate, model, manager, report, weights=form != "dummy")
        with closing(await asyncio.to_thread(open_model, path, manager, form)) as checkpoint:
            engine = cls(config, report)
            try:
                setup = RankSetup(config=config, path=str(path), manifest=manager.manifest())
                engine._send(setup)
                tokenizer = await asyncio.to_thread(
                    checkpoint.tokenizer, trust_remote_code=config.trust_remote_code
                )
                ready = await asyncio.shield(engine._ready)
                engine._intake = Intake(tokenizer, checkpoint, ready.limits, config, manager)
                if tokenizer is not None:
                    engine._intake.grammars.prepare()
            except BaseException:
                await engine.close()
                raise
        return engine

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Queues a prompt, whose answer is read from what this gives.

        Args:
            prompt: text, token ids, or chat messages.
            params, priority, cache_salt, chat_template_kwargs: as for `Engine.generate`.

        Raises:
            ValueError, TypeError: the prompt or an option is refused.
            EngineDead: the engine is closed, or its core has died.
        """
        arrived_at = time.monotonic()
        self._check_open()
        group = self._intake.prepare(prompt, params, priority, cache_salt, chat_template_kwargs)
        outlet = Outlet()
        for sequence in group.sequences:
            sequence.arrived_at, sequence.sink = arrived_at, outlet.put
        self._add(group, outlet)
        return Answer(group, outlet, self._drop)

    def encode(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids that a prompt stands for. RequestError where it is refused."""
        return self._intake.encode(prompt, chat_template_kwargs)

    async def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes and returns how many blocks that were."""
        self._check_open()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._resets.append(answer)
        self._send(messages.ResetPrefixCache())
        return await asyncio.shield(answer)  # whoever waits, the next answer is the next one's

    async def expert_load(self) -> list[ExpertLoad]:
        """As `Engine.expert_load`. The steps in flight are waited for."""
        self._check_open()
        answer: asyncio.Future[list[ExpertLoad]] = asyncio.get_running_loop().create_future()
        self._loads.append(answer)
        self._send(messages.ReadExpertLoad())
        return await asyncio.shield(answer)

    async def close(self, drain_s: float = 0) -> None:
        """Takes no more requests, and waits up to `drain_s` for those that run; then aborts them,
        ends the ranks and the process. May be called twice."""
        self._is_open = False
        await _until(lambda: not self._sequences, drain_s)
        self._drop([sequence for sequence, _ in self._sequences.values()])
        try:
            if self.failure is None:
                self._settle("the engine is closed")
                if self._ready.done():  # else it is loading, and hears nothing
                    self._send(messages.Close())
                    await _until(self._core.has_ended, END_PATIENCE_S)
        finally:
            self._life.cancel()
            await asyncio.wait([self._life])
            self._core.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's; None where it has none."""
        return self._intake.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, else `SamplingParams()`."""
        return self._intake.default_sampling_params

    @property
    def model_info(self) -> SchedulerConfig:
        """The model's sizes, and the limits of a step."""
        return self._intake.limits

    @property
    def description(self) -> dict[str, Any]:
        """The mounted parts and why each was chosen, and what the memory holds, as plain values."""
        return self._ready.result().description | {"processes": {"core": self._core.pid}}

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no token yet."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the sequences that have no token yet."""
        return sum(self._waiting.values())

    @property
    def is_alive(self) -> bool:
        """Whether the core is there."""
        return self.failure is None

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineDead(self.failure)
        if not self._is_open:
            raise EngineDead("the engine is closing")

    def _send(self, message: messages.ToCore) -> None:
        self._core.socket.send(self._codec.encode(message))

    def _add(self, group: Group, outlet: Outlet) -> None:
        try:
            self._send(messages.Add([request for request, _ in group.members]))
        except OverflowError as error:
            raise RequestError(f"a number of the request is beyond 64 bits: {error}") from error
        for request, sequence in group.members:
            self._sequences[request.request_id] = sequence, outlet
            self._waiting[request.request_id] = request.prompt_token_ids.size

    def _drop(self, sequences: list[Sequence]) -> None:
        """Aborts those of `sequences` that still run."""
        running = [each for each in sequences if self._sequences.pop(each.request_id, None)]
        for sequence in running:
            self._waiting.pop(sequence.request_id, None)
            sequence.end("abort")
        if running and self.failure is None:
            self._send(messages.Abort([each.request_id for each in running]))

    async def _live(self) -> None:
        """Hears the core until it dies, then ends everything that waits for it."""
        tasks = [asyncio.create_task(self._hear()), asyncio.create_task(self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._fail(next(task for task in tasks if task in done).result())
            await _until(self._core.has_ended, GRACE_S)
        except Exception as error:
            _log.exception("the front end failed")
            self._fail(EngineDead(f"the front end failed: {type(error).__name__}: {error}"))
        finally:
            for task in tasks:
                task.cancel()
            if self.failure is not None:
                self._core.end()

    async def _hear(self) -> RackmountError:
        """Takes messages, up to the one that tells of the core's end."""
        while True:
            data: bytes = await self._core.socket.recv()
            if not data:
                self._core.hide_socket()
                continue
            match self._codec.decode(data):
                case messages.Stepped(events, stats):
                    self.stats = stats or self.stats
                    self._deliver(events)
                case messages.Progress(stage, done, total):
                    self._report(stage, done, total)
                case messages.Ready() as ready:
                    self._ready.set_result(ready)
                case messages.PrefixCacheReset(num_blocks) if self._resets:
                    self._resets.popleft().set_result(num_blocks)
                case messages.ExpertLoads(layers) if self._loads:
                    self._loads.popleft().set_result(layers)
                case messages.Trouble(name, text, traceback, rank):
                    self._send(messages.Close())  # it waits to be heard
                    return rebuilt(name, text, traceback, rank)
            await asyncio.sleep(0)  # messages that are there already would leave others no turn

    async def _watch(self) -> RackmountError:
        """Looks for signs of life, until there are none."""
        silent_polls = 0  # polls, not seconds: this process may have been stopped itself
        try:
            while silent_polls < MOST_SILENT_POLLS:
                await asyncio.sleep(POLL_S)
                has_beaten = self._core.has_beaten()
                silent_polls = 0 if has_beaten or not self._ready.done() else silent_polls + 1
        except EOFError:
            return EngineDead(f"the engine core {self._core.fate(GRACE_S)}")
        silence = MOST_SILENT_POLLS * POLL_S
        return EngineDead(f"the engine core has given no sign of life for {silence:.0f} s")

    def _deliver(self, events: list[Event]) -> None:
        """Gives events to their sequences."""
        stopped = []
        for event in events:
            name = event.request_id
            if name not in self._sequences:
                continue  # aborted meanwhile
            sequence, _ = self._sequences[name]
            try:
                sequence.take(event)
            except Exception:
                _log.exception("a sequence could not take its token")
                sequence.end("error")
            if sequence.first_token_at is not None or sequence.finish_reason is not None:
                self._waiting.pop(name, None)
            if sequence.finish_reason is not None:
                del self._sequences[name]
                if event.finish_reason is None:
                    stopped.append(name)
        if stopped:
            self._send(messages.Abort(stopped))

    def _fail(self, error: RackmountError) -> None:
        """The core is no more."""
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self.failure is None:
            _log.error("the engine is down: %s", error)
        self._settle(self.failure or str(error))

    def _settle(self, failure: str) -> None:
        """Ends all that waits for the core."""
        self.failure = failure
        for _, outlet in self._sequences.values():
            outlet.fail(failure)
        self._sequences.clear()
        self._waiting.clear()
        for waiting in (self._resets, self._loads):
            while waiting:
                waiting.popleft().set_exception(EngineDead(failure))


async def _until(holds: Callable[[], bool], patience_s: float) -> None:
    """Waits for a condition, and for so long at most."""
    deadline = time.monotonic() + patience_s
    while not holds() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S / 10)
