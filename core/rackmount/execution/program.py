"""The program of a rank: a worker that answers the engine core's messages."""

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rackmount.execution.memory import room_needed
from rackmount.execution.messages import (
    Carve,
    Carved,
    ExpertLoads,
    Load,
    Loaded,
    RankSetup,
    ReadExpertLoad,
)
from rackmount.execution.pending import PendingStep
from rackmount.execution.worker import Worker
from rackmount.garbage import collector_paused
from rackmount.loading.locate import open_model
from rackmount.rack import Rack, draft_rack
from rackmount.sampling.grammars import COMPILE_S, FOLLOWER_COMPILE_S, Grammars
from rackmount.scheduling.plan import StepPlan
from rackmount_registry.checkpoint import Checkpoint, Report, silent
from rackmount_registry.executor import Seat
from rackmount_registry.plugins import PluginManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Live:
    """What the driver's process has already, for a rank in it."""

    manager: PluginManager
    rack: Rack
    checkpoint: Checkpoint
    report: Report


class RankProgram:
    """A `rackmount_registry.executor.Program`. `Load`, `Carve`, then any number of `StepPlan`s and
    `ReadExpertLoad`s.

    Raises:
        PluginError: this process mounts other plugins than the driver.
    """

    def __init__(self, seat: Seat, setup: RankSetup, live: Live | None = None) -> None:
        self._worker: Worker | None = None
        manager = live.manager if live else PluginManager.discover()
        manager.prove(setup.manifest)
        self._setup, self._manager = setup, manager
        self._leads = seat.rank == 0
        self._own = (
            None if live else open_model(Path(setup.path), manager, setup.config.load_format)
        )
        self._checkpoint = live.checkpoint if live else self._own
        self._report = live.report if live and seat.rank == 0 else silent
        if live and seat.num_ranks == 1:
            self._rack = live.rack
        else:
            assert self._checkpoint is not None
            self._rack = draft_rack(setup.config, self._checkpoint.config, manager, seat)

    def answer(
        self, request: Load | Carve | StepPlan | ReadExpertLoad
    ) -> Loaded | Carved | PendingStep | ExpertLoads:
        if isinstance(request, Load):
            return self._load()
        assert self._worker is not None, "weights come first"
        if isinstance(request, Carve):
            return self._carve(self._worker, request.num_kv_blocks)
        if isinstance(request, ReadExpertLoad):
            return ExpertLoads(self._worker.expert_load())
        step: PendingStep = self._worker.execute(request)
        return step

    @collector_paused()
    def _load(self) -> Loaded:
        assert self._checkpoint is not None, "weights are loaded once"
        tokenizer = partial(_read_tokenizer, self._setup, self._manager)
        vocab_size = self._rack.draft.vocab_size
        grammars = Grammars(
            self._setup.config,
            self._manager,
            tokenizer,
            vocab_size,
            COMPILE_S if self._leads else FOLLOWER_COMPILE_S,
        )
        with room_needed(self._rack):
            self._worker = Worker(self._rack, self._checkpoint, self._report, grammars)
            self._checkpoint = None
            if self._own:
                self._own.close()
            num_kv_blocks = self._worker.room()
        return Loaded(num_kv_blocks=num_kv_blocks, weight_bytes_read=self._worker.weight_bytes_read)

    @collector_paused()
    def _carve(self, worker: Worker, num_kv_blocks: int) -> Carved:
        with room_needed(self._rack):
            kv_bytes = worker.carve(num_kv_blocks)
        num_tried, saturation = worker.saturation()
        return Carved(kv_bytes=kv_bytes, saturation=saturation, num_tried=num_tried)

    def close(self) -> None:
        if self._own:
            self._own.close()
        self.__dict__.clear()


def _read_tokenizer(setup: RankSetup, manager: PluginManager) -> "PreTrainedTokenizerBase | None":
    """The model's. Few requests need it in a rank, and long after the weights were read."""
    path, form = Path(setup.path), setup.config.load_format
    with closing(open_model(path, manager, form)) as checkpoint:
        return checkpoint.tokenizer(trust_remote_code=setup.config.trust_remote_code)
