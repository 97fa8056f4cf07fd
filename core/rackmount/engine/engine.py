"""The engine that people call."""

import gc
import threading
from collections import deque
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Several
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from rackmount.config import EngineConfig
from rackmount.engine.core import EngineCore, Event
from rackmount.engine.group import Group
from rackmount.engine.intake import Intake
from rackmount.engine.outputs import RequestOutput, TextChunk
from rackmount.engine.sequence import Sequence
from rackmount.execution.expert_load import ExpertLoad
from rackmount.execution.program import Live
from rackmount.garbage import collector_paused
from rackmount.loading.locate import locate, open_model
from rackmount.rack import Rack, draft_rack
from rackmount.sampling.params import SamplingParams
from rackmount.scheduling.step_output import SchedulerStats
from rackmount.text.prompts import Prompt
from rackmount_registry.checkpoint import Report, silent
from rackmount_registry.errors import RackmountError
from rackmount_registry.plugins import PluginManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Loads a model and answers prompts, in this process or on the ranks that it starts. Threads
    may share it: one of them makes a step, for all.

    Args:
        model: an alias ("qwen3-0.6b"), a hub id ("Qwen/Qwen3-0.6B"), or a path to a folder or file.
            With `load_format="dummy"` its config.json is enough: prompts are token ids then, and
            answers have no text.
        manager: plugins; None discovers what is installed.
        report: told of the progress of downloading and loading.
        arguments: those of `EngineConfig`.

    Raises:
        TypeError: an unknown argument; the nearest legal one is named.
        ConfigError, CheckpointError, SelectionError, PluginError: see their texts.
        RankError: a rank failed, at start or later; the engine is down then.
        SystemExit: on the other ranks of an external launch, once rank 0 has closed its engine.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        manager: PluginManager | None = None,
        report: Report = silent,
        **arguments: Any,
    ) -> None:
        self.config = EngineConfig.create(model=model, **arguments)
        self.manager = manager or PluginManager.discover()
        self._rack: Rack | None = None
        self._core: EngineCore | None = None
        self._sequences: dict[str, Sequence] = {}
        """By request id, until they end."""
        self._turn = threading.RLock()
        """Of the thread whose step it is."""
        self._dropped: deque[str] = deque()
        """Requests that nobody waits for any more, to be ended when the core is not at work."""
        self._at_work = False
        path = locate(model, self.manager, report, weights=self.config.load_format != "dummy")
        checkpoint = open_model(path, self.manager, self.config.load_format)
        try:
            with collector_paused():
                self._rack = rack = draft_rack(self.config, checkpoint.config, self.manager)
                # Before gigabytes are read, too; its library says less well what a config lacks.
                tokenizer = checkpoint.tokenizer(trust_remote_code=self.config.trust_remote_code)
            self._core = EngineCore(
                path,
                Live(manager=self.manager, rack=rack, checkpoint=checkpoint, report=report),
            )
            self._intake = Intake(
                tokenizer, checkpoint, self._core.limits, self.config, self.manager
            )
        except BaseException:
            self.close()
            raise
        finally:
            checkpoint.close()

    def generate(
        self,
        prompts: Prompt | Several[Prompt],
        params: SamplingParams | Several[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, all together, and returns when all are done.

        Args:
            prompts: text, token ids, or chat messages (`{"role", "content"}`); or a list of these.
            params: for all, or one for each prompt; None takes `default_sampling_params`.
            priority: lower goes first under the "priority" policy; "fcfs" does not look at it.
            cache_salt: prefix hits happen only between requests of equal salt.
            chat_template_kwargs: handed to the chat template.

        Returns:
            One output per prompt, in order. In a batch a refused prompt has its error in `error`.

        Raises:
            ValueError: a single prompt that is refused.
        """
        groups = self._intake.prepare_all(
            prompts, params, priority, cache_salt, chat_template_kwargs
        )
        sequences = [each for group in groups for each in group.sequences]
        try:
            self._queue_all(groups)
            while any(each.finish_reason is None for each in sequences):
                self._step()
        finally:
            self._drop(sequences)
        return [group.output() for group in groups]

    def stream(
        self,
        prompts: Prompt | Several[Prompt],
        params: SamplingParams | Several[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[TextChunk]:
        """Answers prompts as `generate` does, chunk by chunk. Closing the generator aborts what
        still runs.

        Several streams may be read in turn. A refused prompt of a batch is one chunk with its
        error; a single one raises here.
        """
        groups = self._intake.prepare_all(
            prompts, params, priority, cache_salt, chat_template_kwargs
        )
        chunks = self._chunks(groups)
        next(chunks)  # so that it has begun: closing it unread aborts too
        return cast(Generator[TextChunk], chunks)

    def _chunks(self, groups: list[Group]) -> Generator[TextChunk | None]:
        """Queues all, gives None, then the chunks."""
        sequences = [each for group in groups for each in group.sequences]
        chunks: deque[TextChunk] = deque()
        for sequence in sequences:
            sequence.sink = chunks.append
        try:
            self._queue_all(groups)
            yield None
            yield from (group.refusal() for group in groups if group.error is not None)
            while True:
                while chunks:
                    yield chunks.popleft()
                if all(each.finish_reason is not None for each in sequences):
                    return
                self._step()
        finally:
            self._drop(sequences)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's; None where it has none."""
        return self._intake.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a sequence, unless `ignore_eos`."""
        return self._intake.eos_token_ids

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, else `SamplingParams()`."""
        return self._intake.default_sampling_params

    @property
    def rack(self) -> Rack:
        """The mounted parts, and why each was chosen. RackmountError once the engine is closed."""
        if self._rack is None:
            raise RackmountError("the engine is closed")
        return self._rack

    @property
    def core(self) -> EngineCore:
        """The engine core. RackmountError once the engine is closed."""
        if self._core is None:
            raise RackmountError("the engine is closed")
        return self._core

    @property
    def stats(self) -> SchedulerStats:
        """Counters of the scheduler."""
        return self.core.stats

    def expert_load(self) -> list[ExpertLoad]:
        """How many tokens chose each expert since the engine started, by layer; empty for a model
        without experts."""
        with self._turn:
            return self.core.expert_load()

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes and returns how many blocks that were."""
        with self._turn:
            return self.core.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Aborts what runs, ends the ranks and gives the memory back; the engine cannot be used
        afterwards."""
        self._drop(list(self._sequences.values()))
        with self._turn:
            core, self._core = self._core, None
            if core is not None:
                core.close()
        self._rack = None  # the sockets of its draft hold the weights
        gc.collect()  # a traced graph refers to itself

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _step(self) -> None:
        """One step of the core, and what came of it to every sequence that runs."""
        with self._turn:
            if not self._work(step=True) and not self.core.events:
                # An interrupt took the core's last word on these.
                for sequence in self._sequences.values():
                    sequence.end("error")
                self._sequences.clear()
            while self.core.events:
                self._deliver(self.core.events[0])

    def _deliver(self, event: Event) -> None:
        """Gives the oldest event to its sequence, and takes it from the core's."""
        sequence = self._sequences.get(event.request_id)
        try:
            if sequence is not None:
                sequence.take(event)
        except BaseException:
            if sequence is not None:
                sequence.end("error")  # it may have taken half of the event
            raise
        finally:
            self.core.events.popleft()
            if sequence is not None and sequence.finish_reason is not None:
                self._sequences.pop(event.request_id, None)
                if event.finish_reason is None:
                    self._dropped.append(event.request_id)

    def _work(self, step: bool) -> bool:
        """Ends the requests that nobody waits for and, if asked to, makes the core's next step."""
        self._at_work = True
        try:
            while self._dropped:
                self.core.abort(self._dropped.popleft())
            return step and self.core.step()
        finally:
            self._at_work = False

    def _queue_all(self, groups: list[Group]) -> None:
        """Gives the requests to the core."""
        with self._turn:
            for request, sequence in [each for group in groups for each in group.members]:
                self._sequences[request.request_id] = sequence
                self.core.add(request)

    def _drop(self, sequences: list[Sequence]) -> None:
        """Aborts those of `sequences` that still run.

        A stream that is collected as garbage comes here at any time, even from within the core:
        then its requests end before the next step.
        """
        with self._turn:
            for sequence in sequences:
                if self._sequences.pop(sequence.request_id, None) is not None:
                    self._dropped.append(sequence.request_id)
                    sequence.end("abort")
            if not self._at_work and self._core is not None:
                self._work(step=False)
