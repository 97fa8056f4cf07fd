"""`rackmount bench startup`: from the start of a process to its first token, phase by phase.

Each run is a fresh process. The first one may have to compile kernels, those after it find them in
the caches on the disk.
"""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from typing import Annotated, Any

import typer

from rackmount import EngineOptions, unfold
from rackmount_registry.errors import RackmountError
from rackmount_tools.record import JsonFile, print_table, write_record
from rackmount_tools.shapes import ModelOrShape

PHASES = ("torch", "imports", "engine", "first token")
COLUMNS = {
    "run": "run",
    "torch": "interpreter and torch s",
    "imports": "plugins s",
    "engine": "engine ready s",
    "first token": "first token s",
    "total": "all s",
    "attention": "attention",
}


def measure(model: str, arguments: dict[str, Any], input_len: int) -> dict[str, Any]:
    """Seconds of each phase of one process, and of all; the parts that served it, and the sizes of
    its CUDA graphs. The backends of attention are told beside them, since `auto` may take others
    once kernels of theirs are compiled.

    Raises:
        RackmountError: what the process raised; or it failed otherwise, and its own words are on
            stderr.
    """
    asked = json.dumps({"model": model, "arguments": arguments, "input_len": input_len})
    command = [sys.executable, "-m", "rackmount_tools.first_token", asked]
    start = time.time()  # the clock that both processes share
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode < 0:
        number = -process.returncode
        killed = ", as by a system that is short of memory" * (number == signal.SIGKILL)
        name = f"signal {number} ({signal.strsignal(number)})"
        raise RackmountError(f"the process that was timed was ended by {name}{killed}")
    if process.returncode:
        raise RackmountError(f"the process that was timed ended with {process.returncode}")
    found = json.loads(process.stdout.splitlines()[-1])
    if "error" in found:
        raise RackmountError(found["error"])
    marks = [start, *(found[phase] for phase in PHASES)]
    phases = zip(PHASES, (b - a for a, b in pairwise(marks)), strict=True)
    named = [part.split(": ") for part in found["parts"]]
    attention = ", ".join(name for kind, name in named if kind == "attention_backend")
    total = {"total": marks[-1] - start}
    served = {name: found[name] for name in found.keys() - set(PHASES)}
    return dict(phases) | total | {"attention": attention} | served


@unfold
def bench(
    model: ModelOrShape,
    repeats: Annotated[int, typer.Option(min=1, help="Processes, one after another.")] = 2,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 16,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Seconds from the start of a process to the first token of MODEL."""
    arguments = engine.arguments()
    rows = [{"run": n + 1, **measure(model, arguments, input_len)} for n in range(repeats)]
    print_table(f"{model}: start-up", COLUMNS, rows)
    write_record(json_file, {"arguments": arguments, "input_len": input_len, "runs": rows})
