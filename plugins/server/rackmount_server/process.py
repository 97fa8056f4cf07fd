"""A server's life: its port, its engine, its signals and its end."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from rackmount import AsyncEngine
from rackmount_registry.errors import ConfigError
from rackmount_server.admission import Admission
from rackmount_server.app import build_app
from rackmount_server.settings import ServerSettings

STOPS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 5.0
"""For replies on their way once the engine has ended all answers."""
AT_ONCE = 130
"""Exit code of a server that waited for nothing."""


def serve(
    settings: ServerSettings,
    start: Callable[[], Any],
    ready: Callable[[AsyncEngine, str], None],
) -> int:
    """Serves until it is told to stop, and gives the exit code: 0, or 1 after the engine
    has died.

    The first SIGINT or SIGTERM lets open answers end for `drain_s`. The second, or one while the
    model loads, ends this process at once, with 130.

    Args:
        start: a coroutine function that gives the engine.
        ready: told the engine and the server's address once connections are taken.

    Raises:
        ConfigError: the address cannot be had; known before the engine starts.
    """
    with bind(settings.host, settings.port) as listener:
        return uvloop.run(_serve_and_leave(settings, listener, start, ready))


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its port, and refuses connections until it is listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            if port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise _no_address(host, port, error) from error
    return listener


class Stop:
    """Counts the signals to stop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.code = 0
        """With which the server is to end."""

    def __call__(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()


class _Server(uvicorn.Server):
    """Without uvicorn's own handling of signals, which raises them again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_and_leave(*given: Any) -> int:
    code = await _serve(*given)
    if code == AT_ONCE:
        # The core's process has been ended. Threads that still download, load or tokenize would be
        # waited for, by the loop and by the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def _serve(
    settings: ServerSettings,
    listener: socket.socket,
    start: Callable[[], Any],
    ready: Callable[[AsyncEngine, str], None],
) -> int:
    stop, loop = Stop(), asyncio.get_running_loop()
    for number in STOPS:
        loop.add_signal_handler(number, stop)
    starting = asyncio.ensure_future(start())
    asked = asyncio.ensure_future(stop.asked.wait())
    await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return AT_ONCE
    engine: AsyncEngine = starting.result()
    try:
        return await _run(settings, listener, engine, stop, ready)
    finally:
        await engine.close()


async def _run(
    settings: ServerSettings,
    listener: socket.socket,
    engine: AsyncEngine,
    stop: Stop,
    ready: Callable[[AsyncEngine, str], None],
) -> int:
    app = build_app(engine, settings)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(settings.drain_s + GRACE_S),
    )
    config.load()  # before the address is told: it may import for long
    server = _Server(config)
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(config.backlog)
    except OSError as error:  # another process listens there since
        raise _no_address(settings.host, settings.port, error) from error
    ready(engine, f"http://{f'[{host}]' if ':' in host else host}:{port}")
    serving = asyncio.ensure_future(server.serve([listener]))
    stopping = asyncio.ensure_future(_stop(settings, engine, stop, server, app.state.admission))
    try:
        await serving
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
    return stop.code


async def _stop(
    settings: ServerSettings,
    engine: AsyncEngine,
    stop: Stop,
    server: uvicorn.Server,
    admission: Admission,
) -> None:
    """Ends the server as the signals say."""
    await stop.asked.wait()
    admission.close()
    server.should_exit = True
    stop.code = 0 if engine.is_alive else 1  # it had failed before
    draining = asyncio.ensure_future(engine.close(settings.drain_s))
    await stop.at_once.wait()
    draining.cancel()
    stop.code = AT_ONCE
    server.force_exit = True


def _no_address(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"host={host!r}, port={port} cannot be listened on: {error}; choose another port, or 0 for "
        "any that is free"
    )
