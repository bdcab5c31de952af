"""The conversation of a program with the policy: which request is new, repeated or refused. No torch."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from millrace.environments.agent_protocol import (
    AgentError,
    ChatRequest,
    as_stream,
    check_model,
    comparable,
    encoded,
    policy_message,
    read_chat,
    read_object,
    response,
)
from millrace.environments.messages_api import messages_stream, read_anthropic, write_message
from millrace.environments.responses_api import read_responses, responses_stream, write_response
from millrace.types import Action, Reply

RETRY_COUNT = "x-stainless-retry-count"
_OTHERWISE = "the run trains one conversation of a program that only grows (branches are not trained)"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A whole request; names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response."""

    status: int
    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class AgentApi:
    """An endpoint whose requests are turns: their form, and that of responses.

    Attributes:
        prefix: of the ids of responses.
        read: reads a body, given the policy's name; AgentError if it is malformed.
        write: returns the response object of a turn.
        stream: returns it as server-sent events.
    """

    prefix: str
    read: Callable[[bytes, str], ChatRequest]
    write: Callable[..., dict[str, Any]]
    stream: Callable[[Mapping[str, Any], ChatRequest], bytes]


APIS: Mapping[str, AgentApi] = {
    "/v1/chat/completions": AgentApi("chatcmpl", read_chat, response, as_stream),
    "/v1/responses": AgentApi("resp", read_responses, write_response, responses_stream),
    "/v1/messages": AgentApi("msg", read_anthropic, write_message, messages_stream),
}


@dataclass(slots=True, eq=False)
class _InFlight:
    digest: bytes
    api: AgentApi
    request: ChatRequest
    answered: asyncio.Future[HttpResponse]


class AgentSession:
    """One episode between the proxy, which calls `handle`, and the environment, which calls the rest.

    Both run on one event loop. A retry of the official clients (the same body, and a retry count above 0)
    gets the recorded response. A request that does not extend the conversation ends it.

    Attributes:
        key: that requests must have.
        name: in ids of responses.
        reward: that the program posted; None before.
    """

    def __init__(
        self,
        key: str,
        model: str,
        name: str,
        *,
        reads_calls: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take what the attributes are, the policy's name, and whether tool calls are read from turns."""
        self.key, self.name = key, name
        self.reward: float | None = None
        self._model, self._reads_calls, self._clock = model, reads_calls, clock
        self._replies: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        self._history: list[str] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._in_flight: _InFlight | None = None
        self._last: tuple[bytes, HttpResponse] | None = None
        self._num_turns = 0
        self._is_over = False

    # ---- the environment's side

    async def next_reply(self) -> Reply:
        """Wait for the program's next request, as what the policy reads next, or as an invalid end.

        It raises an error of the proxy itself, which is neither the program's fault nor the policy's.
        """
        found = await self._replies.get()
        if isinstance(found, Exception):
            raise found
        return found

    def answer(self, action: Action) -> None:
        """Respond to the request in flight with the policy's turn."""
        assert self._in_flight is not None
        api, request, message = self._in_flight.api, self._in_flight.request, policy_message(action)
        self._num_turns += 1
        id = f"{api.prefix}-{self.name}-{self._num_turns}"
        whole = api.write(message, action, id=id, created_s=int(self._clock()), model=self._model)
        if request.stream:
            found = HttpResponse(200, api.stream(whole, request), "text/event-stream")
        else:
            found = HttpResponse(200, encoded(whole))
        known = len(self._history)
        self._history += [comparable(one) for one in (*request.messages[known:], message)]
        self._last = self._in_flight.digest, found
        self._finish(found)

    def end(self) -> None:
        """Refuse a request in flight, which a limit of the run left without response, and all later ones."""
        self._is_over = True
        error = AgentError(
            400,
            "the conversation has reached a limit of the run: tokens of a turn or of the episode, or turns",
            param="messages",
            code="context_length_exceeded",
        )
        self._finish(HttpResponse(error.status, error.body()))

    def _finish(self, found: HttpResponse) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None and not in_flight.answered.done():
            in_flight.answered.set_result(found)

    # ---- the program's side

    async def handle(self, request: HttpRequest, path: str) -> HttpResponse:
        """Respond to a request for a path of this episode; AgentError if it is refused."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not compare_digest(given.encode(), self.key.encode()):
            raise AgentError(
                401,
                "the key is not that of this episode; send OPENAI_API_KEY, which is ANTHROPIC_API_KEY too",
                code="invalid_api_key",
            )
        if self._is_over:
            raise ended()
        try:
            return await self._routed(request, path)
        except AgentError:
            raise
        except Exception as error:
            self._replies.put_nowait(error)
            raise AgentError(500, "the proxy failed; see the run's log") from error

    async def _routed(self, request: HttpRequest, path: str) -> HttpResponse:
        match request.method, path:
            case "POST", _ if path in APIS:
                return await self._turn(request, path)
            case "POST", "/reward":
                return self._post_reward(request.body)
            case "GET", "/v1/models":
                return HttpResponse(200, encoded({"object": "list", "data": [self._card()]}))
            case "GET", _ if path.startswith("/v1/models/"):
                check_model(path.removeprefix("/v1/models/"), self._model)
                return HttpResponse(200, encoded(self._card()))
        raise AgentError(
            404,
            f"there is no {request.method} {path[:60]}; a program has POST {', '.join(APIS)} and /reward, "
            "and GET /v1/models",
        )

    def _card(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "millrace"}

    async def _turn(self, request: HttpRequest, path: str) -> HttpResponse:
        digest = hashlib.sha256(path.encode() + b"\0" + request.body).digest()
        if self._in_flight is not None:
            if digest == self._in_flight.digest:
                return await asyncio.shield(self._in_flight.answered)
            raise AgentError(
                409,
                f"another request of this episode is in progress; {_OTHERWISE}",
                code="concurrent_request",
            )
        is_retry = request.headers.get(RETRY_COUNT, "0").strip() not in ("", "0")
        if is_retry and self._last is not None and self._last[0] == digest:
            return self._last[1]
        api = APIS[path]
        chat = api.read(request.body, self._model)
        if chat.tools and not self._reads_calls:
            raise AgentError(
                400, "the run reads no tool calls; set environment.tool_format in the recipe", param="tools"
            )
        try:
            reply = self._extended(chat)
        except AgentError as error:
            self._is_over = True
            self._replies.put_nowait(Reply(done=True, invalid=f"the program's request: {error}"))
            raise
        answered: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._in_flight = _InFlight(digest, api, chat, answered)
        self._replies.put_nowait(reply)
        return await asyncio.shield(answered)

    def _extended(self, chat: ChatRequest) -> Reply:
        """Return what a request adds to the conversation; AgentError if it is no continuation."""
        if not self._num_turns:
            self._tools = chat.tools
            return Reply(messages=chat.messages, tools=chat.tools)
        pairs = enumerate(zip(self._history, chat.messages, strict=False))
        differs = next((n for n, (one, other) in pairs if one != comparable(other)), None)
        if differs is not None:
            raise _not_extended(f"message {differs} is not the one that was there")
        if len(chat.messages) <= len(self._history):
            raise _not_extended(
                f"it has {len(chat.messages)} messages, and the conversation {len(self._history)} with the "
                "policy's last turn"
            )
        if chat.tools != self._tools:
            raise _not_extended("its tools are not those of the first request")
        added = chat.messages[len(self._history) :]
        if any(message["role"] == "assistant" for message in added):
            raise _not_extended("it has a message of the assistant that the policy did not write")
        return Reply(messages=added)

    def _post_reward(self, body: bytes) -> HttpResponse:
        if self.reward is not None:
            raise AgentError(409, "the reward of this episode was posted already")
        value = reward_of(read_object(body))
        if value is None:
            raise AgentError(400, 'the body is not {"reward": x} with a finite number x', param="reward")
        self.reward = value
        return HttpResponse(200, encoded({"reward": value}))


def ended() -> AgentError:
    """Return the error of a request after the end of its episode."""
    return AgentError(410, "there is no such episode, or it has ended", code="episode_ended")


def _not_extended(why: str) -> AgentError:
    return AgentError(
        400,
        f"the request does not extend the conversation: {why}; {_OTHERWISE}",
        param="messages",
        code="history_not_extended",
    )


def reward_of(value: Any) -> float | None:
    """Return the number of `{"reward": x}`, None for anything else."""
    found = value.get("reward") if isinstance(value, dict) and value.keys() == {"reward"} else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        number = float(found)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def printed_reward(line: str) -> float | None:
    """Return the reward that a line of output is, None if it is none."""
    try:
        return reward_of(json.loads(line))
    except (ValueError, RecursionError):
        return None
