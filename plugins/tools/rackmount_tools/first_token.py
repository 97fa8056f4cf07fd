"""A process that starts an engine and ends with its first token: what `rackmount bench startup`
times.

Usage: python -m rackmount_tools.first_token '{"model": ..., "arguments": {...}, "input_len": 16}'

Writes the times of its phases, in seconds since the epoch, and the parts that served it, as one
line of JSON; or the error that it ended with.
"""

import json
import sys
import time
from typing import Any


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Time of the end of each phase, and "parts"; or "error"."""
    import torch  # noqa: F401  # its import is a phase of its own

    times = {"torch": time.time()}
    from rackmount_registry.errors import RackmountError

    try:
        return times | answered(asked)
    except RackmountError as error:
        return {"error": str(error)}


def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """Of the phases after PyTorch's."""
    from rackmount_registry.plugins import PluginManager
    from rackmount_tools.loads import random_prompts
    from rackmount_tools.runs import greedy, open_engine, timed

    manager = PluginManager.discover()
    times = {"imports": time.time()}
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in asked["arguments"].items()
    }
    length = asked["input_len"]
    with open_engine(
        asked["model"], given, manager, longest=length + 1, because={"input_len": length}
    ) as engine:
        times["engine"] = time.time()
        prompts = random_prompts(1, length, engine.rack.draft.vocab_size)
        timed(engine, prompts, greedy(1))
        times["first token"] = time.time()
        from rackmount_tools.record import describe_rack

        rack = describe_rack(engine.rack)
        return times | {name: rack[name] for name in ("parts", "decode_sizes", "mixed_sizes")}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
