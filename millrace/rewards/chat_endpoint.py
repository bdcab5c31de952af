"""One request over HTTP, such as to a chat endpoint of OpenAI's form. Standard library only."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import IO

_MAX_BODY_BYTES = 4 << 20
_READ_BYTES = 1 << 16


class Unreachable(OSError):
    """There was no reply: no connection, a timeout, or bytes that are no HTTP."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply of any status; `retry_after_s` is what its header asks for, 0 without one."""

    status: int
    body: bytes
    retry_after_s: float = 0.0


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Leave the redirect as the reply."""
        return None


class ChatEndpoint:
    """Posts to `base_url`/`path`; thread-safe. `key` goes into the header only."""

    def __init__(
        self,
        base_url: str,
        key: str = "",
        *,
        path: str = "chat/completions",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._clock = f"{base_url.rstrip('/')}/{path}", clock
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(NoRedirect)

    def __call__(self, body: bytes | None, timeout_s: float) -> HttpReply:
        """Send a request and return the reply; without a body it is a GET.

        Raises:
            Unreachable: there is none in time.
        """
        method = "GET" if body is None else "POST"
        request = urllib.request.Request(self._url, body, self._headers, method=method)
        return exchange(self._opener, request, timeout_s, clock=self._clock)


def exchange(
    opener: urllib.request.OpenerDirector,
    request: urllib.request.Request,
    timeout_s: float,
    *,
    max_bytes: int = _MAX_BODY_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> HttpReply:
    """Send a request and return the reply, whose body has at most so many bytes.

    Raises:
        Unreachable: there is none in time.
    """
    deadline_s = clock() + timeout_s
    try:
        try:
            reply = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:  # also a reply
            reply = error
        with reply:
            found = bytearray()
            while part := reply.read1(_READ_BYTES):
                found += part
                if len(found) > max_bytes:
                    raise Unreachable(f"its reply has more than {max_bytes:,} bytes")
                if clock() > deadline_s:
                    raise Unreachable(f"its reply took longer than {timeout_s:g} s")
            return HttpReply(reply.status, bytes(found), _seconds(reply.headers.get("Retry-After")))
    except Unreachable:
        raise
    except TimeoutError:
        raise Unreachable(f"no reply within {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        raise Unreachable(str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from None


def _seconds(header: str | None) -> float:
    """The seconds of a Retry-After header; 0 for none or a date."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0
