"""A session on a server of OpenEnv: its protocol over a WebSocket. No torch.

Uses the package `websockets`, not OpenEnv's own client, which requires gradio and much else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millrace.data.functions import explain
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.observability.plain import plain_text

_MAX_BYTES, _MAX_REASON = 16 << 20, 500
_OBSERVATION = {"observation", "reward", "done"}
# Kinds of pydantic's errors that no text of the policy causes, but the names of fields.
_OF_NAMES = {"missing", "extra_forbidden"}
_INVALID = "VALIDATION_ERROR"


class RefusedActionError(Exception):
    """The server refused the values of an action; the message is its reason."""


class OpenEnvSession:
    """A connection that the first request opens. Deadlines are the caller's."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Take the address of the server, which begins with `http`, and headers of the request that opens."""
        self._url, self._headers = url, headers
        self._connection: Any = None

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `observation`, `reward` and `done` after a `reset` or `step`.

        Raises:
            RefusedActionError: the server refused the values of an action.
            EnvironmentFailed: it is lost, reports another error or replies nonsense.
        """
        from websockets.exceptions import WebSocketException

        try:
            if self._connection is None:
                self._connection = await self._connected()
            await self._connection.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await self._connection.recv())
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailed(f"lost the server {self._url}: {explain(error)}") from error
        except (ValueError, RecursionError) as error:
            raise EnvironmentFailed(f"got no JSON from {self._url}") from error
        try:
            found: Mapping[str, Any] = reply["data"]
            if reply["type"] == "observation" and found.keys() >= _OBSERVATION:
                return found
            errors = found.get("errors") or []
            reasons = [
                found["message"],
                *(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors),
            ]
            reason, code = plain_text("; ".join(reasons), _MAX_REASON), found.get("code")
            of_names = any(one["type"] in _OF_NAMES for one in errors)
        except (AttributeError, KeyError, TypeError) as error:
            raise EnvironmentFailed(f"got a reply from {self._url} that is not OpenEnv's") from error
        if kind == "step" and code == _INVALID and not of_names:
            raise RefusedActionError(reason)
        hint = "; correct environment.action_field and environment.action" if of_names else ""
        raise EnvironmentFailed(f"got an error from {self._url} in {kind}: {reason} ({code}){hint}")

    async def close(self) -> None:
        """End the session, if it was opened."""
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> Any:
        from websockets.asyncio.client import connect

        return await connect(
            f"ws{self._url.removeprefix('http').rstrip('/')}/ws",
            additional_headers=self._headers,
            open_timeout=None,
            ping_interval=None,
            close_timeout=1.0,
            max_size=_MAX_BYTES,
        )
