"""A server with the OpenAI interface that answers as it is told, piece by piece and in its own
time."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

HANG_UP = "hang up"
"""A piece that closes the connection."""

Piece = tuple[float, str | dict[str, Any]]
"""Seconds to wait, then the data of an event: JSON, or text as it is."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """An answer."""

    pieces: list[Piece]
    status: int = 200


def text(word: str = "a", finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": word, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": counts}


def answer(first_s: float, gap_s: float, chunks: int, tokens: int | None = None) -> Script:
    """Chunks at known times, then the end; of one token each, or so many in all."""
    gaps = [first_s] + [gap_s] * (chunks - 1)
    words: list[Piece] = [(gap, text()) for gap in gaps]
    end: list[Piece] = [(0, text("", "length")), (0, usage(3, tokens or chunks)), (0, "[DONE]")]
    return Script(pieces=words + end)


@dataclass
class FakeOpenAI:
    """What was asked of it, and how it answers: `script` is given the place of the request in the
    order in which they came."""

    script: Callable[[int], Script]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies, with "path" and "authorization"."""
    at_once: int = 0
    most_at_once: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request by request."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        first, *lines = head.split("\r\n")
        method, path, _ = first.split()
        headers = {k.lower(): v.strip() for k, _, v in (each.partition(":") for each in lines)}
        if method == "GET":
            listed = {"data": [{"id": "fake"}]} if path == "/v1/models" else {"is": "fake"}
            return self._head(writer, 200, json.dumps(listed))
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        script = self.script(len(self.asked))
        self.asked.append(
            body | {"path": path, "authorization": headers.get("authorization"), "at": now()}
        )
        if script.status != 200:
            return self._head(writer, script.status, json.dumps({"error": {"message": "no"}}))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._stream(script, writer)
        finally:
            self.at_once -= 1

    async def _stream(self, script: Script, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for seconds, piece in script.pieces:
            await asyncio.sleep(seconds)
            if piece == HANG_UP:
                raise ConnectionError
            data = piece if isinstance(piece, str) else json.dumps(piece)
            event = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    def _head(self, writer: asyncio.StreamWriter, status: int, body: str) -> None:
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )


def now() -> float:
    """The running loop's clock."""
    return asyncio.get_running_loop().time()


@contextmanager
def fake_openai(script: Callable[[int], Script] | Script) -> Iterator[FakeOpenAI]:
    """The server at work, in a thread of its own."""
    fake = FakeOpenAI(script if callable(script) else lambda _: script)
    ready: Future[Callable[[], object]] = Future()
    """Holds what ends the server."""

    async def main() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        ready.set_result(partial(loop.call_soon_threadsafe, end.set))
        await end.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=[main()])
    thread.start()
    end = ready.result()
    try:
        yield fake
    finally:
        end()
        thread.join()
