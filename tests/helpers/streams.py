"""Clients that stream over a bare socket: they cost little, and may hang up at any byte."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass
class Stream:
    """What a client has of its answer."""

    status: int = 0
    """0 before there is one."""
    events: list[Any] = field(default_factory=list)
    """JSON of each, without the last "[DONE]"."""
    body: bytes = b""
    """Of a reply that is no stream."""
    done: bool = False
    """Whether "[DONE]" came."""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return "".join(
            choice.get("text", "")
            for event in self.events
            for choice in event.get("choices", ())
            if choice["index"] == 0
        )

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice, where they were asked for."""
        return [
            token_id
            for event in self.events
            for choice in event.get("choices", ())
            if choice["index"] == 0
            for token_id in choice.get("token_ids") or ()
        ]

    @property
    def usage(self) -> dict[str, int]:
        return next(event["usage"] for event in reversed(self.events) if event.get("usage"))


async def stream(
    port: int, path: str, body: dict[str, Any], hang_up_after: int | None = None
) -> Stream:
    """Streams an answer to its end, or until so many events have come: 0 sends the request and
    goes. Every second one that hangs up resets the connection.

    Raises:
        OSError: nobody listens, or the connection broke.
    """
    got = Stream()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    try:
        data = json.dumps({"stream": True} | body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        await writer.drain()
        if hang_up_after == 0:
            return got
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        got.status = int(head.split()[1])
        if "text/event-stream" not in head:
            got.body = await reader.read()
            return got
        async for line in _lines(reader):
            if line == DONE:
                got.done = True
                break
            got.events.append(json.loads(line))
            if len(got.events) == hang_up_after:
                break
    except asyncio.IncompleteReadError as error:
        raise ConnectionError(f"the server hung up after {error.partial!r}") from error
    finally:
        if hang_up_after is not None and hang_up_after % 2:
            writer.transport.abort()
        writer.close()
    return got


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Data of each event of a chunked body."""
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        piece = await reader.readexactly(size + 2)
        *whole, rest = (rest + piece[:-2]).split(b"\n\n")
        for event in whole:
            yield event.decode().removeprefix("data: ")
