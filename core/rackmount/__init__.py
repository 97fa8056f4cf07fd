"""rackmount: a plugin-based runtime for mixture-of-experts and quantized language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rackmount.cli.options import EngineOptions, Model, unfold
    from rackmount.cli.progress import progress
    from rackmount.config import EngineConfig
    from rackmount.engine.engine import Engine
    from rackmount.engine.outputs import Completion, RequestOutput, TextChunk
    from rackmount.engine.sequence import Sequence
    from rackmount.execution.batch import PersistentBatch
    from rackmount.execution.expert_load import ExpertLoad
    from rackmount.loading.locate import locate, open_model, read_config
    from rackmount.rack import Rack, draft_rack
    from rackmount.report import startup_report
    from rackmount.sampling.params import SamplingParams
    from rackmount.sampling.request import TokenLogprobs
    from rackmount.scheduling.config import SchedulerConfig
    from rackmount.scheduling.request import Request
    from rackmount.scheduling.scheduler import Scheduler
    from rackmount.serving.answer import Answer
    from rackmount.serving.async_engine import AsyncEngine
    from rackmount.serving.errors import EngineDead
    from rackmount.text.prompts import Prompt
    from rackmount_registry.grammar import GrammarSpec

__all__ = [
    "Answer",
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineOptions",
    "ExpertLoad",
    "GrammarSpec",
    "Model",
    "PersistentBatch",
    "Prompt",
    "Rack",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "TextChunk",
    "TokenLogprobs",
    "draft_rack",
    "locate",
    "open_model",
    "progress",
    "read_config",
    "startup_report",
    "unfold",
]

_HOMES = {
    "Answer": "rackmount.serving.answer",
    "AsyncEngine": "rackmount.serving.async_engine",
    "Completion": "rackmount.engine.outputs",
    "Engine": "rackmount.engine.engine",
    "EngineConfig": "rackmount.config",
    "EngineDead": "rackmount.serving.errors",
    "EngineOptions": "rackmount.cli.options",
    "ExpertLoad": "rackmount.execution.expert_load",
    "GrammarSpec": "rackmount_registry.grammar",
    "Model": "rackmount.cli.options",
    "PersistentBatch": "rackmount.execution.batch",
    "Prompt": "rackmount.text.prompts",
    "Rack": "rackmount.rack",
    "Request": "rackmount.scheduling.request",
    "RequestOutput": "rackmount.engine.outputs",
    "SamplingParams": "rackmount.sampling.params",
    "Scheduler": "rackmount.scheduling.scheduler",
    "SchedulerConfig": "rackmount.scheduling.config",
    "Sequence": "rackmount.engine.sequence",
    "TextChunk": "rackmount.engine.outputs",
    "TokenLogprobs": "rackmount.sampling.request",
    "draft_rack": "rackmount.rack",
    "locate": "rackmount.loading.locate",
    "open_model": "rackmount.loading.locate",
    "progress": "rackmount.cli.progress",
    "read_config": "rackmount.loading.locate",
    "startup_report": "rackmount.report",
    "unfold": "rackmount.cli.options",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that importing a light module of this package
    stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from rackmount.garbage import collector_paused

    with collector_paused():
        home = importlib.import_module(_HOMES[name])
    return getattr(home, name)
