"""A server's address, and its end as signals say. The engine is a fake."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import Any

import httpx
import pytest
from tests.helpers.fake_engine import FakeEngine

from rackmount_registry.errors import ConfigError
from rackmount_server import process
from rackmount_server.settings import ServerSettings

SETTINGS = ServerSettings(model_names=("m",), port=0, drain_s=5)
LONG = {"prompt": "A", "max_tokens": 200, "stream": True}


class Engine(FakeEngine):
    """A fake that closes as an engine does."""

    is_closed = False

    async def close(self, drain_s: float = 0) -> None:
        deadline = asyncio.get_running_loop().time() + drain_s
        while self.open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for sequence, _ in [*self.open.values()]:
            self._drop([sequence])
        self.is_closed = True


def run(
    engine: Engine,
    act: Callable[[httpx.AsyncClient], Awaitable[None]],
    settings: ServerSettings = SETTINGS,
) -> int:
    """The exit code of a server that `act` uses."""
    acting: list[asyncio.Future[None]] = []

    async def start() -> Engine:
        return engine

    async def drive(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
            await act(client)

    async def serve() -> int:
        listener = process.bind(settings.host, settings.port)
        ready = lambda _, address: acting.append(asyncio.ensure_future(drive(address)))  # noqa: E731
        code = await process._serve(settings, listener, start, ready)
        await acting[0]
        return code

    code = asyncio.run(serve())
    assert engine.is_closed
    return code


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_address_is_told_once_connections_are_taken() -> None:
    engine = Engine()
    replies: list[bytes] = []

    async def start() -> Engine:
        return engine

    def ready(_: Any, address: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        asking = socket.create_connection((host, int(port)))  # at once, before anything else runs
        asking.sendall(b"GET /health HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n")

        def read() -> None:
            with asking:
                replies.append(asking.recv(15))
            stop()

        asyncio.get_running_loop().run_in_executor(None, read)

    async def serve() -> int:
        with process.bind("127.0.0.1", 0) as listener:
            return await process._serve(SETTINGS, listener, start, ready)

    assert asyncio.run(serve()) == 0
    assert replies == [b"HTTP/1.1 200 OK"]


def test_a_signal_lets_open_answers_end() -> None:
    engine = Engine()

    async def act(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=LONG) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            engine.go.clear()
            stop()
            await asyncio.sleep(0.3)
            for path in ("/health", "/ready"):
                with pytest.raises(httpx.ConnectError):
                    await client.get(path)
            engine.go.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"

    assert run(engine, act) == 0


def test_what_takes_longer_than_the_drain_ends_with_an_error() -> None:
    engine = Engine()

    async def act(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=LONG) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            engine.go.clear()
            stop()
            last = [line async for line in lines if line][-1]
            assert "the server stops" in last

    assert run(engine, act, ServerSettings(model_names=("m",), port=0, drain_s=0.2)) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    engine = Engine()

    async def act(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=LONG) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            engine.go.clear()
            stop(signal.SIGINT)
            await asyncio.sleep(0.3)
            stop(signal.SIGINT)
            with suppress(httpx.TransportError):
                assert "data: [DONE]" not in [line async for line in lines]

    assert run(engine, act) == 130


def test_a_server_whose_engine_died_ends_with_1() -> None:
    engine = Engine()

    async def act(client: httpx.AsyncClient) -> None:
        engine.die()
        assert (await client.get("/health")).status_code == 503
        stop()

    assert run(engine, act) == 1


def test_a_signal_while_the_model_loads_ends_it() -> None:
    cancelled = False

    async def start() -> None:
        nonlocal cancelled
        stop()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def serve() -> int:
        with process.bind("127.0.0.1", 0) as listener:
            return await process._serve(SETTINGS, listener, start, lambda *_: None)

    assert asyncio.run(serve()) == 130
    assert cancelled


LOADING = """
import asyncio, time
from rackmount_server.process import serve
from rackmount_server.settings import ServerSettings

async def start():
    print("loading", flush=True)
    await asyncio.to_thread(time.sleep, 20)

serve(ServerSettings(model_names=("m",), port=0), start, None)
"""


def test_a_signal_ends_it_whatever_thread_still_loads() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE) as loading:
        assert loading.stdout is not None
        assert loading.stdout.readline() == b"loading\n"
        loading.send_signal(signal.SIGINT)
        try:
            assert loading.wait(10) == 130
        finally:
            loading.kill()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_a_drain_without_an_end_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="drain_seconds"):
        ServerSettings(model_names=("m",), drain_s=seconds)


def test_a_key_that_no_header_carries_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"API key 2 .*ASCII"):
        ServerSettings(model_names=("m",), api_keys=("a", "\u00e9"))


def test_an_engine_that_does_not_start_is_the_error() -> None:
    async def start() -> None:
        raise ConfigError("no such thing")

    with pytest.raises(ConfigError, match="no such thing"):
        process.serve(SETTINGS, start, lambda *_: None)


def test_an_address_that_is_taken_is_an_error_with_its_port() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        settings = ServerSettings(model_names=("m",), port=port)
        with pytest.raises(ConfigError, match=f"port={port}.*in use"):
            process.serve(settings, never, never)
    with pytest.raises(ConfigError, match=r"host='no\.such\.host\.invalid'"):
        process.bind("no.such.host.invalid", 0)


def never(*given: Any) -> Any:
    raise AssertionError("the address comes first")


def test_eight_addresses_are_eight() -> None:
    bound = [process.bind("127.0.0.1", 0) for _ in range(8)]
    assert len({each.getsockname() for each in bound}) == 8
    for each in bound:
        each.close()
