"""What the front end and the engine core say to each other."""

import traceback
from typing import Any, Self

import msgspec

from rackmount.engine.core import Event
from rackmount.execution.expert_load import ExpertLoad
from rackmount.execution.messages import RankSetup
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.request import Request
from rackmount.scheduling.step_output import SchedulerStats
from rackmount_registry.executor import RankError


class Add(msgspec.Struct, array_like=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, array_like=True, tag=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, array_like=True, tag=True):
    """Forget all cached prefixes, and answer."""


class ReadExpertLoad(msgspec.Struct, array_like=True, tag=True):
    """Answer with what `EngineCore.expert_load` gives."""


class Close(msgspec.Struct, array_like=True, tag=True):
    """End the ranks, then the process."""


class Progress(msgspec.Struct, array_like=True, tag=True):
    """What a `rackmount_registry.checkpoint.Report` is told."""

    stage: str
    done: int
    total: int | None


class Ready(msgspec.Struct, array_like=True, tag=True):
    limits: SchedulerConfig
    description: dict[str, Any]
    """See `AsyncEngine.description`."""


class Stepped(msgspec.Struct, array_like=True, tag=True):
    """What a step brought."""

    events: list[Event]
    stats: SchedulerStats | None
    """A few times a second, and when nothing is left to do."""


class PrefixCacheReset(msgspec.Struct, array_like=True, tag=True):
    num_blocks: int


class ExpertLoads(msgspec.Struct, array_like=True, tag=True):
    layers: list[ExpertLoad]


class Trouble(msgspec.Struct, array_like=True, tag=True):
    """The exception that ends the process; nothing follows."""

    name: str
    text: str
    traceback: str
    rank: int | None
    """Of a `RankError`."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        return cls(
            name=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(error)),
            rank=error.rank if isinstance(error, RankError) else None,
        )


ToCore = RankSetup | Add | Abort | ResetPrefixCache | ReadExpertLoad | Close
"""The first is the `RankSetup`."""

FromCore = Progress | Ready | Stepped | PrefixCacheReset | ExpertLoads | Trouble
"""Before the first of them comes an empty message: the process has found the socket."""
