"""The requests of a program to the policy: which is new, repeated or refused. No torch."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Any

from millrace.environments.agent_protocol import (
    AgentError,
    ChatRequest,
    as_stream,
    check_model,
    encoded,
    policy_message,
    read_chat,
    read_object,
    response,
)
from millrace.environments.completions_api import (
    TextRequest,
    check_vocabulary,
    completion_stream,
    read_completion,
    write_completion,
)
from millrace.environments.conversation_tree import ConversationTree
from millrace.environments.messages_api import messages_stream, read_anthropic, write_message
from millrace.environments.responses_api import read_responses, responses_stream, write_response
from millrace.types import Action, Reply

RETRY_COUNT = "x-stainless-retry-count"
Request = ChatRequest | TextRequest


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
    read: Callable[[bytes, str], Request]
    write: Callable[..., dict[str, Any]]
    stream: Callable[[Mapping[str, Any], Any], bytes]


APIS: Mapping[str, AgentApi] = {
    "/v1/chat/completions": AgentApi("chatcmpl", read_chat, response, as_stream),
    "/v1/completions": AgentApi("cmpl", read_completion, write_completion, completion_stream),
    "/v1/responses": AgentApi("resp", read_responses, write_response, responses_stream),
    "/v1/messages": AgentApi("msg", read_anthropic, write_message, messages_stream),
}


@dataclass(slots=True, eq=False)
class _InFlight:
    api: AgentApi
    request: Request
    reply: Reply
    answered: asyncio.Future[HttpResponse]


class AgentSession:
    """One episode between the proxy, which calls `handle`, and the environment, which calls the rest.

    Both run on one event loop. A retry of the official clients (the same body, and a retry count above 0)
    gets the response of the first. Requests at the same time are answered one after another. A request that
    extends no conversation opens a branch; see `ConversationTree`.

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
        num_tokens: int = 0,
        max_branches: int = 16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take what the attributes are, the policy's name, and whether tool calls are read from turns.

        `num_tokens` is the size of the vocabulary.
        """
        self.key, self.name = key, name
        self.reward: float | None = None
        self._model, self._reads_calls, self._clock = model, reads_calls, clock
        self._num_tokens, self._tree = num_tokens, ConversationTree(max_branches)
        self._waiting: asyncio.Queue[_InFlight | Exception] = asyncio.Queue()
        # Those without a response, the one that the policy answers, and of each path and body the newest.
        self._in_flight: list[_InFlight] = []
        self._current: _InFlight | None = None
        self._responses: dict[bytes, asyncio.Future[HttpResponse]] = {}
        self._num_turns = 0
        self._is_over = False

    # ---- the environment's side

    async def next_reply(self) -> Reply:
        """Wait for the program's next request, as what the policy reads next.

        It raises an error of the proxy itself, which is neither the program's fault nor the policy's.
        """
        found = await self._waiting.get()
        if isinstance(found, Exception):
            raise found
        self._current, found.reply = found, self.counted(found.reply)
        return found.reply

    def counted(self, reply: Reply) -> Reply:
        """Return a reply to a turn with the number of requests that were refused since the one before."""
        if not self._num_turns:
            return reply
        return replace(reply, refused=self._tree.take_refused())

    def answer(self, action: Action) -> None:
        """Respond with the policy's turn to the request that `next_reply` returned."""
        assert self._current is not None
        api, request, message = self._current.api, self._current.request, policy_message(action)
        self._tree.add(self._num_turns, request, message, action)
        self._num_turns += 1
        id, now_s = f"{api.prefix}-{self.name}-{self._num_turns}", int(self._clock())
        whole = api.write(message, action, request, id=id, created_s=now_s, model=self._model)
        if request.stream:
            found = HttpResponse(200, api.stream(whole, request), "text/event-stream")
        else:
            found = HttpResponse(200, encoded(whole))
        self._current.answered.set_result(found)
        self._in_flight.remove(self._current)
        self._current = None

    def refuse(self) -> None:
        """Refuse the request that `next_reply` returned, whose branch would have too many tokens."""
        assert self._current is not None
        self._tree.withdraw(self._current.reply)
        self._end_by_limit(self._current)
        self._current = None

    def end(self) -> None:
        """Refuse requests in flight, which a limit of the run left without response, and all later ones."""
        self._is_over = True
        for one in [*self._in_flight]:
            self._end_by_limit(one)

    def _end_by_limit(self, one: _InFlight) -> None:
        error = AgentError(
            400,
            "the conversation has reached a limit of the run: tokens of a turn or of the episode, or turns",
            param="messages",
            code="context_length_exceeded",
        )
        one.answered.set_result(HttpResponse(error.status, error.body()))
        self._in_flight.remove(one)

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
            self._waiting.put_nowait(error)
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
        is_retry = request.headers.get(RETRY_COUNT, "0").strip() not in ("", "0")
        if is_retry and digest in self._responses:
            return await asyncio.shield(self._responses[digest])
        api = APIS[path]
        given = api.read(request.body, self._model)
        if isinstance(given, TextRequest):
            check_vocabulary(given, self._num_tokens)
        elif given.tools and not self._reads_calls:
            raise AgentError(
                400, "the run reads no tool calls; set environment.tool_format in the recipe", param="tools"
            )
        answered: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        in_flight = _InFlight(api, given, self._tree.place(given), answered)
        self._in_flight.append(in_flight)
        self._waiting.put_nowait(in_flight)
        self._responses[digest] = answered
        return await asyncio.shield(answered)

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
