"""An executor without a model, as a plugin that other processes find too: what a step costs beside
the model, and steps that fail."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rackmount.execution.messages import Carve, Carved, Loaded, StepResult
from rackmount.scheduling.plan import StepPlan
from rackmount_registry import hookimpl
from rackmount_registry.descriptors import Executor
from rackmount_registry.executor import Launch

TOKEN, RAISES, BREAKS_DEVICE, INTERRUPTS = ord("x"), 1, 2, 3
"""What it answers always, and prompts of which a step fails."""

ERRORS = {
    RAISES: ValueError("as the prompt asks"),
    BREAKS_DEVICE: torch.AcceleratorError("as the prompt asks"),
    INTERRUPTS: KeyboardInterrupt("as the prompt asks"),
}

FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: null\nVersion: 0\n"
    "Requires-Dist: rackmount-registry>=1.0,<2\n",
    "entry_points.txt": "[rackmount]\nnull = tests.helpers.null_executor\n",
}


class NullExecutor:
    """Written against the registry and the messages of the ranks alone."""

    def __init__(self, launch: Launch) -> None:
        self._plans: deque[StepPlan] = deque()

    def call(self, request: Any) -> list[Any]:
        if isinstance(request, Carve):
            return [Carved(kv_bytes=0)]
        return [Loaded(num_kv_blocks=4096, weight_bytes_read=0)]

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        for admission in plan.admitted:
            if (error := ERRORS.get(int(admission.token_ids[0]))) is not None:
                raise error
        return StepResult(token_ids=np.full(int(plan.samples.sum()), TOKEN, np.int32))

    def forget(self) -> None:
        self._plans.clear()

    def close(self) -> None:
        self._plans.clear()


@hookimpl
def executors() -> list[Executor]:
    return [Executor(name="null", factory="tests.helpers.null_executor:NullExecutor")]


def null_plugin(folder: Path) -> str:
    """A distribution with the executor "null": to be put on `sys.path`."""
    home = folder / "null-0.dist-info"
    home.mkdir()
    for name, text in FILES.items():
        (home / name).write_text(text)
    return str(folder)
