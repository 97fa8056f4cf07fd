"""Where a figure was taken: a benchmark's result says nothing without it."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine(*distributions: str) -> dict[str, object]:
    """Processor, cores, Python, and the versions of these distributions."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in distributions},
    }


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
