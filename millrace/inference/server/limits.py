"""The door: who may come in, how many at once, and how much they may bring."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.inference.server.errors import ApiError

OPEN = ("/health",)
# The verbs that steer the engine must get through when it is busiest.
COUNTED = ("/v1/", "/generate", "/tokenize", "/detokenize")
# A body that is too long is read on for so many times the limit, so that its sender hears the answer.
PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes.

    Attributes:
        token: that every request must show; None lets everybody in.
        max_concurrent: requests that are answered at once.
        max_body_bytes: of one request.
        body_timeout_s: in which the body must arrive.
    """

    token: str | None = None
    max_concurrent: int = 1024
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0


class Door:
    """ASGI middleware that holds `Limits`, and hands on requests whose body is there as a whole."""

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        """A door in front of `app`."""
        self._app = app
        self._limits = limits
        self._num_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or let the app do it."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        is_counted = scope["path"].startswith(COUNTED)
        try:
            self._check_token(scope)
            if is_counted and self._num_inside >= self._limits.max_concurrent:
                raise ApiError(
                    429,
                    f"{self._num_inside} requests are being answered already; ask again later",
                    code="busy",
                )
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._num_inside += is_counted
        try:
            try:
                body = await self._read(scope, receive)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        finally:
            self._num_inside -= is_counted

    def _check_token(self, scope: Scope) -> None:
        if self._limits.token is None:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        # Compared in constant time: how long it takes tells nothing of how many letters were right.
        if not hmac.compare_digest(given, b"Bearer " + self._limits.token.encode()):
            raise ApiError(
                401,
                "the token is missing or wrong; send the header Authorization: Bearer TOKEN",
                code="invalid_api_key",
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None where its sender left before it was there."""
        limits = self._limits
        parts, size = [], 0
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                while size <= PATIENCE * limits.max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= limits.max_body_bytes:
                        parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
        if size > limits.max_body_bytes:
            raise ApiError(413, f"the body has more than {limits.max_body_bytes} bytes; send less at once")
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receiver that gives the body that was read, then whatever comes after it."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return left.pop() if left else await receive()

    return give
