"""`rackmount serve` as users run it: a process of its own, and what it leaves."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import psutil
from tests.helpers.checkpoints import edit_config, tiny_checkpoint
from tests.helpers.engines import NUM_BYTE_IDS, byte_tokenizer, chain_checkpoint

START_S = 180.0
"""For a start, beside others that start."""
IN_TIME_S = 10.0
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
OPENER = build_opener(ProxyHandler({}))


@dataclass
class Served:
    """A server; `temporary` is the folder for temporary files that it has to itself."""

    process: subprocess.Popen[bytes]
    log: Path
    temporary: Path
    url: str = ""
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    """All processes that were ever found below it."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def answers(self, path: str = "/ready") -> bool:
        """Whether it is ready."""
        found = ADDRESS.search(self.text())
        self.url = found[0] if found else ""
        self.processes()
        return bool(found) and self.status(path) == 200

    def await_ready(self) -> "Served":
        """AssertionError with its words where it ends before."""
        deadline = time.monotonic() + START_S
        while not self.answers():
            assert self.process.poll() is None, f"{self.process.returncode}: {self.text()}"
            assert time.monotonic() < deadline, f"not ready after {START_S} s: {self.text()}"
            time.sleep(0.1)
        return self

    def processes(self) -> list[psutil.Process]:
        """The server's own, and all below it."""
        try:
            root = psutil.Process(self.process.pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self.seen |= {each.pid: each for each in found}
        return found

    def below(self) -> list[psutil.Process]:
        return self.processes()[1:]

    def request(
        self, path: str, body: Any = None, *, timeout_s: float = 60.0, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a reply; status 0 where nobody answers."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        asked = Request(self.url + path, data, {"content-type": "application/json", **headers})
        try:
            with OPENER.open(asked, timeout=timeout_s) as reply:
                return reply.status, _lower(reply.headers), reply.read()
        except HTTPError as error:
            with error:
                return error.code, _lower(error.headers), error.read()
        except (URLError, OSError):
            return 0, {}, b""

    def status(self, path: str, body: Any = None) -> int:
        return self.request(path, body)[0]

    def json(self, path: str, body: Any = None) -> Any:
        """Of a reply that is one."""
        status, _, data = self.request(path, body)
        assert status == 200, (status, data)
        return json.loads(data)

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric."""
        _, _, data = self.request("/metrics")
        lines = re.findall(rf"^rackmount:{name}(?:{{.*}})? (\S+)$", data.decode(), re.MULTILINE)
        assert lines, f"no rackmount:{name} in {data!r}"
        return sum(map(float, lines))

    def await_idle(self, seconds: float = IN_TIME_S) -> None:
        """AssertionError where a request lives on, or holds KV blocks."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        await_true(lambda: not any(map(self.metric, names)), seconds)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def interrupt(self) -> None:
        """Ctrl-C: all of the terminal's group hear it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def await_end(self, seconds: float = IN_TIME_S) -> int:
        """The exit code; AssertionError where it lives on."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"alive after {seconds} s: {self.text()}") from None

    def assert_nothing_left(self, seconds: float = IN_TIME_S) -> None:
        """No process below it, no file of it, no port."""
        await_true(lambda: not any(map(_alive, self.seen.values())), seconds)
        await_true(lambda: not list(self.temporary.iterdir()), seconds)
        if self.url:
            assert self.status("/health") == 0


@contextmanager
def started(
    model: Path | str, *flags: str, port: int = 0, writes_files: bool = True
) -> Iterator[Served]:
    """A server that may not be ready yet. Ended at the latest here."""
    # Not pytest's folder: names of sockets may have 107 bytes.
    with TemporaryDirectory(prefix="rm") as folder:
        log, temporary = Path(folder) / "log", Path(folder) / "tmp"
        temporary.mkdir()
        command = [sys.executable, "-m", "rackmount.cli.app", "serve", str(model)]
        with log.open("wb") as file:
            # Its own output goes by a pipe, as it may write no file, that one included.
            writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
            process = subprocess.Popen(
                [*command, "--port", str(port), *flags],
                stdin=subprocess.DEVNULL,
                stdout=writer.stdin,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)},
                start_new_session=True,
                preexec_fn=None if writes_files else _write_nothing,
            )
            assert writer.stdin is not None
            writer.stdin.close()
        server = Served(process, log, temporary)
        try:
            yield server
        finally:
            for each in [*server.processes(), *server.seen.values()]:
                if _alive(each):
                    each.kill()
            process.wait()
            writer.wait()


@contextmanager
def served(model: Path | str, *flags: str) -> Iterator[Served]:
    """A server that answers."""
    with started(model, *flags) as server:
        yield server.await_ready()


SMALL = (
    *("--device", "cpu", "--num-kv-blocks", "64", "--block-size", "4"),
    *("--max-num-seqs", "8", "--served-model-name", "tiny"),
)
"""Flags of a server with little room."""


MANY = 2**17
"""Positions of a model whose answers take minutes."""


def endless_checkpoint(folder: Path) -> Path:
    """A chain of bytes, whose answers may be so long that they never end."""
    chain_checkpoint(folder)
    edit_config(folder, lambda config: config.update(max_position_embeddings=MANY))
    return folder


def byte_checkpoint(folder: Path, positions: int = 256) -> Path:
    """A random model that attends, with an id for each byte."""
    tiny_checkpoint(folder, "llama", vocab_size=NUM_BYTE_IDS, max_position_embeddings=positions)
    byte_tokenizer().save_pretrained(folder)
    return folder


def await_true(condition: Any, seconds: float) -> None:
    """AssertionError where `condition()` is not true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def _write_nothing() -> None:
    """As on a disk that is full: a file that is written to is an error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
