"""What every request passes before it is read: its arrival is noted, its key and size checked.

Written as plain ASGI: nothing is added to the messages of a stream.
"""

import base64
import binascii
import hmac
import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackmount_server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})
"""What answers without a key."""

CHALLENGE = {"WWW-Authenticate": 'Bearer, Basic realm="rackmount"'}


class Gate:
    """Lets through to `app` what has one of `api_keys`, if there are any, and a body that is not
    above `max_body_bytes`.

    A key comes as "Bearer", or as the password of "Basic", which browsers ask people for.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["arrived_at"] = time.monotonic()
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers.get("authorization", "")):
            error = ApiError(401, "an API key of this server is needed", headers=CHALLENGE)
            return await error.response()(scope, receive, send)
        if length.isdecimal() and int(length) > self._max_body_bytes:
            error = ApiError(413, self._too_large(), headers={"Connection": "close"})
            return await error.response()(scope, receive, send)
        return await self._app(scope, self._counted(receive), send)

    def _has_key(self, authorization: str) -> bool:
        if not self._keys:
            return True
        scheme, _, given = authorization.partition(" ")
        key = given.strip().encode()
        if scheme.lower() == "basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        # Each is compared, in constant time: how long it takes says nothing.
        return any([hmac.compare_digest(key, each) for each in self._keys])

    def _counted(self, receive: Receive) -> Receive:
        """`receive`, up to the limit: a body may come without saying its size."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is too large; at most {self._max_body_bytes} bytes are taken"


def arrival(request: Request) -> float:
    """When a request arrived, by the monotonic clock."""
    return float(request.scope["arrived_at"])
