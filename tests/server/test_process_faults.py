"""`rackmount serve` killed, stopped, crowded: in time there is the right exit code or red health,
an answer to everyone, and nothing left.

Each starts real servers, which takes seconds each.
"""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.served import (
    IN_TIME_S,
    MANY,
    START_S,
    Served,
    await_true,
    byte_checkpoint,
    endless_checkpoint,
    served,
    started,
)
from tests.helpers.streams import Stream, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOM = ("--device", "cpu", "--num-kv-blocks", "16384", "--block-size", "16")
ENDLESS = {"prompt": "A", "max_tokens": 100_000, "ignore_eos": True, "temperature": 0}
"""Takes minutes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_checkpoint(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two ranks."""
    return byte_checkpoint(tmp_path_factory.mktemp("wide"), MANY)


@pytest.fixture
def shared_memory() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    await_true(lambda: set(Path("/dev/shm").iterdir()) <= before, IN_TIME_S)


class Background:
    """Streams in a thread of their own."""

    def __init__(self, server: Served, count: int, body: dict[str, Any]) -> None:
        self._pool = ThreadPoolExecutor(count)
        self.streams: list[Future[Stream]] = [
            self._pool.submit(asyncio.run, stream(server.port, "/v1/completions", body))
            for _ in range(count)
        ]
        await_true(lambda: server.metric("num_requests_running") >= 1, 30)

    def assert_told(self) -> None:
        """Each has ended in time, with an error in the stream, a status, or a broken
        connection: none takes what came for the whole."""
        deadline = time.monotonic() + IN_TIME_S
        for each in self.streams:
            error = each.exception(max(0.1, deadline - time.monotonic()))
            if error is not None:
                assert isinstance(error, OSError), error
                continue
            got = each.result()
            assert not got.done, "what was cut off says that it is whole"
            assert got.status >= 500 or "error" in got.events[-1], got


def core_of(server: Served) -> psutil.Process:
    pid = server.json("/server_info")["description"]["processes"]["core"]
    return psutil.Process(pid)


def assert_red(server: Served) -> None:
    """Health is red, requests are refused, and the server still ends in order."""
    await_true(lambda: server.status("/health") == 503, IN_TIME_S)
    assert server.status("/ready") == 503
    status, _, body = server.request("/v1/completions", ENDLESS)
    assert status == 503, body
    server.signal(signal.SIGTERM)
    assert server.await_end() == 1, server.text()
    server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_a_killed_core_turns_health_red_and_everyone_is_told(model: Path) -> None:
    with served(model, *ROOM) as server:
        background = Background(server, 3, ENDLESS)
        core_of(server).kill()
        background.assert_told()
        assert_red(server)


@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_turns_health_red_and_everyone_is_told(wide: Path, rank: int) -> None:
    with served(wide, *ROOM, "--tp", "2") as server:
        background = Background(server, 3, ENDLESS)
        workers = core_of(server).children()
        assert len(workers) == 2
        workers[rank].kill()
        background.assert_told()
        assert_red(server)


@pytest.mark.usefixtures("shared_memory")
def test_a_stopped_core_turns_health_red_and_does_not_stop_it_from_answering(model: Path) -> None:
    with served(model, *ROOM) as server:
        core = core_of(server)
        core.suspend()
        try:
            began = time.monotonic()
            assert server.status("/health") in (200, 503)
            assert time.monotonic() - began < IN_TIME_S
            await_true(lambda: server.status("/health") == 503, IN_TIME_S)
            server.signal(signal.SIGTERM)
            server.await_end(45)
        finally:
            if core.is_running():
                core.resume()
        server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_killed_front_end_takes_everything_with_it(wide: Path, tp: int) -> None:
    with served(wide, *ROOM, "--tp", str(tp)) as server:
        background = Background(server, 3, ENDLESS)
        assert len(server.below()) == (1 if tp == 1 else 3)
        server.signal(signal.SIGKILL)
        background.assert_told()
        assert server.await_end() == -signal.SIGKILL
        server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_a_terminated_server_ends_its_answers_and_takes_no_more(model: Path) -> None:
    with served(model, *ROOM) as server:
        short = Background(server, 4, ENDLESS | {"max_tokens": 200})
        server.signal(signal.SIGTERM)
        await_true(lambda: server.status("/ready") in (0, 503), IN_TIME_S)
        for each in short.streams:
            got = each.result(30)
            assert got.done and got.events, got
            assert got.text.startswith("BCDE")
        assert server.await_end() == 0, server.text()
        server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_a_terminated_server_without_requests_ends_at_once(model: Path) -> None:
    with served(model, *ROOM) as server:
        server.signal(signal.SIGTERM)
        assert server.await_end() == 0, server.text()
        assert "Traceback" not in server.text()
        server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_a_second_interrupt_ends_the_server_at_once(model: Path) -> None:
    with served(model, *ROOM) as server:
        background = Background(server, 3, ENDLESS)
        server.interrupt()
        time.sleep(1)
        assert server.process.poll() is None, "the first lets answers end"
        server.interrupt()
        assert server.await_end() == 130, server.text()
        background.assert_told()
        assert "Traceback" not in server.text()
        server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_an_interrupt_while_the_server_starts_ends_it(model: Path) -> None:
    for delay in (1.0, 3.0, 6.0):
        with started(model, *ROOM) as server:
            time.sleep(delay)
            server.processes()
            server.interrupt()
            code, was_up = server.await_end(), "serving at" in server.text()
            # A program that is not loaded itself yet ends by the signal.
            assert code in ((0,) if was_up else (130, -signal.SIGINT)), server.text()
            server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_a_port_in_use_is_told_with_its_number(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started(model, *ROOM, port=port) as server:
            assert server.await_end(START_S) == 2, server.text()
            assert str(port) in server.text()
            assert "Traceback" not in server.text()
            server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_a_model_that_is_not_there_ends_the_start_with_a_code(tmp_path: Path) -> None:
    with started(tmp_path / "nothing", *ROOM) as server:
        assert server.await_end(START_S) == 2
        assert "Traceback" not in server.text()
        assert "error: " in server.text()
        server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_a_full_disk_ends_the_start_or_does_not_matter(model: Path) -> None:
    with started(model, *ROOM, writes_files=False) as server:
        await_true(lambda: server.process.poll() is not None or server.answers(), START_S)
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
            assert server.await_end() == 0, server.text()
        else:
            assert server.process.returncode > 0, server.text()
        assert "Traceback" not in server.text()
        server.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_eight_servers_start_at_once_and_leave_nothing(model: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(started(model, *ROOM)) for _ in range(8)]
        for each in servers:
            each.await_ready()
        assert len({each.port for each in servers}) == 8
        for each in servers:
            reply = each.json("/v1/completions", {"prompt": "A", "max_tokens": 4, "temperature": 0})
            assert reply["choices"][0]["text"] == "BCDE"
        for each in servers:
            each.signal(signal.SIGTERM)
        for each in servers:
            assert each.await_end(30) == 0, each.text()
            each.assert_nothing_left()


@pytest.mark.usefixtures("shared_memory")
def test_clients_that_hang_up_leave_no_request(model: Path) -> None:
    with served(model, *ROOM) as server:

        async def many() -> None:
            asked = (
                stream(server.port, "/v1/completions", ENDLESS, hang_up_after=each % 4)
                for each in range(24)
            )
            await asyncio.gather(*asked, return_exceptions=True)

        asyncio.run(many())
        server.await_idle()
        assert server.json("/v1/completions", {"prompt": "A", "max_tokens": 3, "temperature": 0})


def test_clients_that_read_nothing_grow_no_memory(model: Path) -> None:
    """Long answers to deaf clients: once the kernel's buffers are full, the server keeps little
    more than the tokens of what it goes on to compute."""
    name = "m" * 8000  # is in every event, so that buffers are full soon
    with served(model, *ROOM, "--served-model-name", name) as server, ExitStack() as stack:
        front = psutil.Process(server.process.pid)
        for _ in range(4):
            stack.enter_context(_deaf_client(server.port))

        def is_stuck() -> bool:
            taken = server.metric("generation_tokens_total")
            time.sleep(1)
            return taken > 0 and server.metric("generation_tokens_total") == taken

        await_true(is_stuck, 60)
        begin, computed = front.memory_full_info().uss, server.metric("computed_tokens_total")
        time.sleep(10)
        computed = server.metric("computed_tokens_total") - computed
        grown = front.memory_full_info().uss - begin
        assert computed > 2000, "the engine waits for its clients"
        assert grown < 100 * computed + 2**21, f"{grown} bytes for {computed} tokens"
        assert server.metric("num_requests_running") == 4
        stack.close()
        server.await_idle()


def _deaf_client(port: int) -> socket.socket:
    """Asks for an endless answer, and never reads."""
    client = socket.create_connection(("127.0.0.1", port))
    data = json.dumps(ENDLESS | {"stream": True}).encode()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(data), data)
    )
    return client
