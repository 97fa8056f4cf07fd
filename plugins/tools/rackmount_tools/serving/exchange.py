"""One request, streamed, and when its client saw what of the answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from rackmount_tools.serving.asks import Ask

DONE = b"[DONE]"


class ExchangeError(Exception):
    """What went wrong, in few words that are the same for all alike, and what was said of it."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(kind)
        self.kind, self.text = kind, text


@dataclass(kw_only=True)
class Exchange:
    """Times are seconds on the client's clock. An answer without an error is whole."""

    due: float
    """When it was to be sent."""
    sent: float = 0.0
    """When it was: later than due where others had to end first, or the client is too slow."""
    chunks: list[float] = field(default_factory=list)
    """Of each chunk with tokens."""
    end: float = 0.0
    """Of the stream, whichever way it ended."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them: a chunk may hold any number."""
    finish_reason: str | None = None
    error: str | None = None
    error_text: str = ""

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between two chunks."""
        return [b - a for a, b in pairwise(self.chunks)]

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None where there is one token, or one chunk."""
        if self.output_tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.end - self.sent


async def exchange(
    client: httpx.AsyncClient, ask: Ask, common: dict[str, Any], due: float, timeout_s: float
) -> Exchange:
    """Sends `ask` with the fields that all have in common. Failures are in what it gives."""
    seen = Exchange(due=due, sent=time.perf_counter())
    body = {"stream": True, "stream_options": {"include_usage": True}} | common | ask.fields
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", ask.path, json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise ExchangeError(f"HTTP {response.status_code}", text)
            await _read(response, seen)
    except ExchangeError as error:
        seen.error, seen.error_text = error.kind, error.text
    except TimeoutError:
        seen.error = f"no end within {timeout_s:g} s"
    except httpx.HTTPError as error:
        seen.error, seen.error_text = type(error).__name__, str(error)
    seen.end = time.perf_counter()
    return seen


async def _read(response: httpx.Response, seen: Exchange) -> None:
    async for data in events(response.aiter_bytes()):
        now = time.perf_counter()
        if data == DONE:
            break
        _note(_parsed(data), now, seen)
    else:
        raise ExchangeError("the stream ended before [DONE]")
    if not seen.output_tokens:
        raise ExchangeError("no count of tokens in the stream")
    if not seen.chunks:
        raise ExchangeError("no token in the stream")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as it comes whole."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ExchangeError("a chunk that is not JSON", repr(data)) from error
    if not isinstance(chunk, dict):
        raise ExchangeError("a chunk that is no object", repr(data))
    if told := chunk.get("error"):
        raise ExchangeError("an error in the stream", json.dumps(told))
    return chunk


def _note(chunk: dict[str, Any], now: float, seen: Exchange) -> None:
    if usage := chunk.get("usage"):
        seen.prompt_tokens = usage.get("prompt_tokens", 0)
        seen.output_tokens = usage.get("completion_tokens", 0)
    for choice in chunk.get("choices") or ():
        seen.finish_reason = choice.get("finish_reason") or seen.finish_reason
        if _has_tokens(choice):
            seen.chunks.append(now)


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether it brings text, or a token without any: more than a role or the end."""
    delta = choice.get("delta") or {}
    if choice.get("text") or any(value for key, value in delta.items() if key != "role"):
        return True
    return "role" not in delta and not choice.get("finish_reason")
