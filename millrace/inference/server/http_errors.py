"""Errors as OpenAI's error JSON: one sentence, the field concerned, and the HTTP status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from millrace.inference.server.logs import printable

RETRY_AFTER_S = 1
# Maximal length of a client's value in a message, and of a whole message, in characters.
MAX_SHOWN = 60
MAX_MESSAGE = 1000
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Json(JSONResponse):
    """A JSON body in ASCII, so that a lone surrogate from a client cannot break the response."""

    def render(self, content: Any) -> bytes:
        """Encode a body."""
        return encode(content)


def encode(content: Any) -> bytes:
    """Encode as JSON in one line of ASCII; ValueError if a number is NaN or infinite, which JSON lacks."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def shown(text: str) -> str:
    """Return a client's text for a message: truncated and without control characters."""
    text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return printable(text)


class ApiError(Exception):
    """An error response; `param` is the field of the body concerned, `code` is machine-readable."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or kind}
        }

    def response(self) -> Json:
        """Return the response, with the headers of its status."""
        headers = {
            401: {"WWW-Authenticate": "Bearer"},
            # The unread rest of the body would be parsed as the next request.
            408: {"Connection": "close"},
            413: {"Connection": "close"},
            429: {"Retry-After": str(RETRY_AFTER_S)},
            503: {"Retry-After": str(RETRY_AFTER_S)},
        }
        return Json(self.body(), status_code=self.status, headers=headers.get(self.status))


def bad_request(error: ValueError, fields: Mapping[str, Any]) -> ApiError:
    """Convert a ValueError to a 400; `param` is the first word of its message if that is in `fields`."""
    message = str(error)
    first = message.split(maxsplit=1)[0] if message else ""
    return ApiError(400, message, param=first if first in fields else None)


def install(app: FastAPI) -> None:
    """Install handlers that return every error of `app` in OpenAI's shape."""

    async def known(request: Request, error: Exception) -> Json:
        assert isinstance(error, ApiError)
        return error.response()

    async def invalid(request: Request, error: Exception) -> Json:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error.errors()).response()

    async def routed(request: Request, error: Exception) -> Json:
        assert isinstance(error, HTTPException)
        path = f"{shown(request.method)} {shown(request.url.path)}"
        if error.status_code in (404, 405):
            return ApiError(error.status_code, f"there is no {path}").response()
        return ApiError(error.status_code, f"{path}: {error.detail}").response()

    async def unknown(request: Request, error: Exception) -> Json:
        # The server raises it again after this response, so that the log has the traceback.
        name = type(error).__name__
        return ApiError(500, f"the server failed with {name}; see the server's log").response()

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routed)
    app.add_exception_handler(Exception, unknown)


def _of_validation(errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    place = _place(first)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "field":
        return ApiError(400, first["msg"], param=first["ctx"]["param"])
    if not place:
        return ApiError(400, "the body is not a JSON object; send one with Content-Type: application/json")
    if first["type"] == "missing":
        return ApiError(400, f"{place} is missing; add it", param=place)
    messages = dict.fromkeys(
        _lower(e["msg"]) for e in errors if _place(e).split(".")[0] == place.split(".")[0]
    )
    return ApiError(400, f"{place} is {shown(repr(first['input']))}: {' or '.join(messages)}", param=place)


def _place(error: Any) -> str:
    """`stream_options.include_usage` or `messages.0.role`."""
    _, *parts = error["loc"]
    # pydantic adds the kinds of a union, such as str and list[str].
    names = (str(part) for part in parts if isinstance(part, int) or part.isidentifier())
    return ".".join(name for name in names if name not in ("str", "int"))


def _lower(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[0].lower() + message[1:]
