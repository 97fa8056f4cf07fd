"""How answers leave: whole or as server-sent events, and not at all once the client is gone."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rackmount_server.errors import as_api_error

_log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class HangUp(Exception):  # noqa: N818  # no error: it is how readers end
    """The client hung up: what was done for it is cancelled."""


def event(payload: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class Json(Response):
    """A body that msgspec writes; floats that JSON cannot say become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EventStream(Response):
    """Streams what `events` yields.

    The reply starts with the first event, so an error before it has a status of its own. A later
    one is an event, and the stream then lacks its [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except HangUp:
            return  # the server has closed the connection

    async def _send_all(self, send: Send) -> None:
        started = False

        async def put(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not started:
                        head = {"type": "http.response.start", "status": 200}
                        await send(head | {"headers": self.raw_headers})
                        started = True
                    await put(data)
            except Exception as error:
                if not started:
                    raise
                told = as_api_error(error)
                if told.status == 500:
                    _log.exception("a stream failed")
                await put(event(told.body()), more=False)
            else:
                await put(DONE, more=False)


async def whole(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """The reply that `work` gives, as JSON."""
    try:
        return Json(await unless_gone(request.receive, work))
    except HangUp:
        return Response(status_code=499)  # which nobody reads


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client hangs up, and has ended on return.

    Raises:
        HangUp: the client hung up first.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HangUp
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
