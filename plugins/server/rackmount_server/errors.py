"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from rackmount import EngineDead, SamplingParams
from rackmount_registry.errors import RackmountError

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""By status; other refusals are "invalid_request_error", failures "server_error"."""

SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams)) - {"grammar"}
"""Parameters that are fields of requests, too."""

UNION_TAG = re.compile(r"str|int|Tokenize\w+|[a-z]+\[.*")
"""What pydantic puts into an error's place for a branch of a union."""


class ApiError(Exception):
    """What a client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """The reply's JSON. Lone surrogates, which JSON can carry and UTF-8 cannot, show as "?"."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": TYPES.get(self.status, fallback),
            "param": self.param,
            "code": self.code,
        }
        plain = {k: v and v.encode(errors="replace").decode() for k, v in error.items()}
        return {"error": plain}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`; of a mistake in the program, no more than its kind."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _invalid(error.errors())
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case EngineDead():
            return ApiError(503, str(error), code="engine_unavailable")
        case RackmountError() if isinstance(error, ValueError):
            return bad_request(error)
        case RackmountError():
            return ApiError(500, str(error))
        case _:
            return ApiError(500, f"internal error: {type(error).__name__}")


def bad_request(error: Exception, param: str | None = None) -> ApiError:
    """400 for what the engine refuses; `param` where the text does not begin with a parameter."""
    first = re.match(r"\w*", str(error))
    named = first is not None and first[0] in SAMPLING_NAMES
    return ApiError(400, str(error), param=first[0] if first and named else param)


def add_error_handlers(app: FastAPI) -> None:
    """Every error of every route leaves in the one shape."""

    async def reply(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (ApiError, RequestValidationError, HTTPException, RackmountError, Exception):
        app.add_exception_handler(kind, reply)


def _invalid(errors: Sequence[Any]) -> ApiError:
    """400 for the first field that is wrong."""
    first = errors[0]
    place = [str(it) for it in first["loc"][1:]]
    param = ".".join(it for it in place if not UNION_TAG.fullmatch(it)) or None
    alike = [it["msg"] for it in errors if it["loc"][:2] == first["loc"][:2]]
    match first["type"]:
        case "extra_forbidden":
            text = f"{param!r} is not a field that is known or supported; leave it out"
        case "none_required":
            text = f"{param!r} is not supported; leave it out"
        case "missing" if param:
            text = f"{param!r} is missing"
        case "json_invalid":
            param, text = None, f"the body is no JSON: {first['ctx']['error']} at {place[0]}"
        case _ if param is None:
            text = "the body must be a JSON object, sent as content-type application/json"
        case _:
            text = f"{param!r}: {'; or: '.join(dict.fromkeys(alike))}"
    return ApiError(HTTPStatus.BAD_REQUEST, text, param=param)
