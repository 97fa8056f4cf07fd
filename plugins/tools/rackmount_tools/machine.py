"""Where a figure was taken: a benchmark's result says nothing without it."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rackmount import Rack
from rackmount_registry.errors import ConfigError

LIBRARIES = ("torch", "triton", "numpy", "flash-attn-4", "flashinfer-python")
"""Distributions whose kernels the figures may be of."""
SELF = ":/plugins/tools/rackmount_tools/machine.py"
"""This file in a checkout, for git."""


def require_device(rack: Rack) -> None:
    """As an engine would: `explain` alone speaks of devices that are not here.

    Raises:
        ConfigError: there is no GPU.
    """
    if rack.device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={rack.device}: no GPU is there; choose device='cpu'")


def describe_machine(*distributions: str) -> dict[str, object]:
    """Processor, cores, Python, the commit where it is known, and the versions of these
    distributions and of those among `LIBRARIES` that are installed."""
    commit = commit_of(Path.cwd()) or os.environ.get("RACKMOUNT_COMMIT")
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **({"commit": commit} if commit else {}),
        **_installed(LIBRARIES),
        **{name: version(name) for name in distributions},
    }


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def commit_of(folder: Path) -> str | None:
    """The commit of `folder`, with "+changes" where tracked files differ from it; None where it
    is no checkout of this project."""
    if _said("git", "-C", str(folder), "ls-files", "--error-unmatch", SELF) is None:
        return None
    commit = _said("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _said("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changes else commit


def driver_version() -> str | None:
    """Of NVIDIA's driver; None where nobody tells."""
    said = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.splitlines()[0] if said else None


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _said(*command: str) -> str | None:
    """What a program writes; None where it is missing or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None
