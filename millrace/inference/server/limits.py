"""Middleware: which hosts and tokens are accepted, how many requests at once, and how much they may send."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.inference.server.address import is_allowed_host
from millrace.inference.server.http_errors import ApiError, shown

# They need no token: neither reveals anything about the model or its requests.
OPEN = ("/health", "/docs")
# Control requests and expensive ones need the admin token. They do not count against `max_concurrent`.
STEERING = (
    "/abort",
    "/pause",
    "/resume",
    "/sleep",
    "/wake",
    "/update_weights",
    "/fingerprint",
)
COUNTED = ("/v1/", "/inference/", "/generate", "/tokenize", "/detokenize")
# A body above the limit is read up to so many times the limit, so that the client receives the error.
PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Access control and resource limits of a server.

    Attributes:
        token: for every request except control requests. If both tokens are None, no request needs one.
        admin_token: for all requests. Without it, a server with a token accepts no control request.
        allowed_hosts: more names accepted in the Host header.
        body_timeout_s: seconds until the body must have arrived.
        header_timeout_s: seconds until the headers must have arrived, for the first request from the
            connection's start, for a later one from its first byte.
        idle_timeout_s: seconds that a connection may be idle between requests.
        write_timeout_s: seconds that a client may read nothing of a response.
    """

    token: str | None = None
    admin_token: str | None = None
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    max_concurrent: int = 1024
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 30.0
    write_timeout_s: float = 30.0


class AccessControl:
    """ASGI middleware that enforces `Limits` and passes requests on once their whole body has arrived."""

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._num_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject one request, or pass it to the app."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_open, is_counted = scope["path"] in OPEN, scope["path"].startswith(COUNTED)
        try:
            self._check_origin(scope)
            if not is_open:
                self._check_token(scope)
                _check_content_type(scope)
            if is_counted and self._num_inside >= self._limits.max_concurrent:
                raise ApiError(
                    429,
                    f"{self._num_inside} requests are being answered already; ask again later",
                    code="busy",
                )
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if is_open:
            await self._app(scope, receive, send)
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

    def _check_origin(self, scope: Scope) -> None:
        """Reject cross-site requests: with DNS rebinding, the page's name is in Host, otherwise in Origin."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not is_allowed_host(host, self._limits.host, self._limits.allowed_hosts):
            raise ApiError(
                421,
                f"this server does not answer as {shown(host)}; ask for it by its address, or start it with "
                "--allowed-host NAME",
            )
        origin = headers.get("origin", "")
        if origin and origin.partition("://")[2].lower() != host.lower():
            raise ApiError(403, f"requests of web pages are refused, and this one comes from {shown(origin)}")

    def _check_token(self, scope: Scope) -> None:
        limits = self._limits
        if limits.token is None and limits.admin_token is None:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        may_steer = is_bearer & _is_same(given, limits.admin_token)
        may_ask = (is_bearer & _is_same(given, limits.token)) | may_steer
        if not may_ask:
            raise ApiError(
                401,
                "the token is missing or wrong; send the header Authorization: Bearer TOKEN",
                code="invalid_api_key",
            )
        if scope["path"] in STEERING and not may_steer:
            way_out = (
                "start the server with --admin-token or the environment variable MILLRACE_ADMIN_TOKEN"
                if limits.admin_token is None
                else "send that one"
            )
            raise ApiError(
                403, f"{scope['path']} needs the admin token; {way_out}", code="admin_token_needed"
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
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


def _check_content_type(scope: Scope) -> None:
    """Reject types other than JSON: a web page may send forms and text cross-site without a preflight."""
    if scope["method"] in ("GET", "HEAD"):
        return
    headers = Headers(scope=scope)
    given = headers.get("content-type", "")
    is_empty = headers.get("content-length") in (None, "", "0") and not headers.get("transfer-encoding")
    if not given and is_empty:
        return  # nothing is sent, as to /resume; a page's Origin was checked
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415, f"the body is {shown(given) or 'of no type'}; send JSON with Content-Type: application/json"
        )


def _is_same(given: str, token: str | None) -> bool:
    """Compare in constant time, against timing attacks."""
    return token is not None and hmac.compare_digest(given.strip().encode("latin-1"), token.encode())


def _replay(body: bytes, receive: Receive) -> Receive:
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return left.pop() if left else await receive()

    return give
