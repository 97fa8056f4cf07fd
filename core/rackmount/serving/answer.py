"""A request's answer, chunk by chunk, for a coroutine to read."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Self

from rackmount.engine.group import Group
from rackmount.engine.outputs import RequestOutput, TextChunk
from rackmount.engine.sequence import Sequence
from rackmount.serving.errors import EngineDead

MOST_PIECES = 64
"""Chunks of one sequence that nobody has taken, before they are made one."""


class Outlet:
    """Chunks that wait to be read. Those of one sequence that wait together are read as one, so a
    slow reader takes long chunks, and holds no more than the answer itself."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[TextChunk]] = {}
        """By sequence; the one that waits longest first."""
        self._news = asyncio.Event()
        self._failure: str | None = None

    def put(self, chunk: TextChunk) -> None:
        pieces = self._pieces.setdefault(chunk.index, [])
        pieces.append(chunk)
        if len(pieces) > MOST_PIECES:
            pieces[:] = [_joined(pieces)]
        self._news.set()

    def fail(self, failure: str) -> None:
        """No more comes, and the reader is to hear why."""
        self._failure = failure
        self._news.set()

    async def take(self) -> TextChunk:
        """The next chunk. EngineDead where none comes."""
        while not self._pieces:
            if self._failure is not None:
                raise EngineDead(self._failure)
            self._news.clear()
            await self._news.wait()
        return _joined(self._pieces.pop(next(iter(self._pieces))))


class Answer:
    """An async iterator over the chunks of a prompt's `n` sequences.

    Closing it, or dropping it, aborts what still runs. It raises `EngineDead` when the engine core
    has died, after what came before.
    """

    def __init__(
        self, group: Group, outlet: Outlet, abort: Callable[[list[Sequence]], None]
    ) -> None:
        self._group, self._outlet, self._abort = group, outlet, abort
        self._loop = asyncio.get_running_loop()
        self._num_open = len(group.members)

    @property
    def sequences(self) -> list[Sequence]:
        """The `n` sequences, as far as they have come."""
        return self._group.sequences

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.sequences[0].prompt_token_ids

    async def output(self) -> RequestOutput:
        """The whole answer, once it is there. Where this is cancelled, the request is aborted."""
        try:
            async for _ in self:
                pass
        finally:
            await self.aclose()
        return self._group.output()

    async def aclose(self) -> None:
        """Aborts what still runs; nothing is read afterwards."""
        self._num_open = 0
        self._abort(self.sequences)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextChunk:
        if not self._num_open:
            raise StopAsyncIteration
        chunk = await self._outlet.take()
        if chunk.finish_reason is not None:
            self._num_open -= 1
        return chunk

    def __del__(self) -> None:
        if self._num_open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, self._group.sequences)


def _joined(pieces: list[TextChunk]) -> TextChunk:
    """Chunks of one sequence, in order, as one."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return replace(
        last,
        text="".join(piece.text for piece in pieces),
        token_ids=list(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=logprobs or None,
    )
