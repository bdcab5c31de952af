"""The environment `nemo_gym`: a resources server of NeMo Gym, driven as its `simple_agent` does. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote
from urllib.request import HTTPCookieProcessor, ProxyHandler, Request, build_opener

from millrace.environments.agent_protocol import AgentError, policy_message
from millrace.environments.agent_session import reward_of
from millrace.environments.responses_api import read_responses, write_response
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.tool_environment import CallThreads, ToolEnvironment, ToolRules
from millrace.environments.tool_functions import Tool
from millrace.errors import SetupError
from millrace.protocols import Environment
from millrace.rewards.chat_endpoint import HttpReply, NoRedirect, Unreachable, exchange
from millrace.types import Action, Reply, Task

# The column of a row that is the request to begin with.
PARAMETERS = "responses_create_params"
# Until a server has answered at the start of a run, in seconds.
START_S = 60.0
# A request whose step is late keeps its thread so long.
_REQUEST_S = 600.0
_MAX_BYTES = 16 << 20
_MODEL, _MAX_REASON = "policy", 300
# Texts are not shortened here, as in NeMo Gym; a longer one than an episode may have ends it.
_MAX_CHARACTERS = 1 << 40


class NemoGymSession:
    """Requests of one episode, with the server's cookies. They block."""

    def __init__(self, url: str) -> None:
        """Take the address of the server."""
        self.url = url.rstrip("/")
        self._opener = build_opener(HTTPCookieProcessor(), NoRedirect, ProxyHandler({}))

    def post(self, path: str, body: Mapping[str, Any]) -> HttpReply:
        """Return the reply to an object, as `sent` does."""
        # JSON has no halves of characters.
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        request = Request(f"{self.url}/{quote(path)}", data, {"Content-Type": "application/json"})
        return self.sent(request, _REQUEST_S)

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object that the reply to another is; EnvironmentFailed if it is none."""
        reply = self.post(path, body)
        if not 200 <= reply.status < 300:
            text = reply.body.decode("utf-8", "replace")[:_MAX_REASON]
            raise EnvironmentFailed(f"got status {reply.status} from {self.url}/{path}: {text}")
        try:
            found = json.loads(reply.body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise EnvironmentFailed(f"got no JSON object from {self.url}/{path}")
        return found

    def sent(self, request: Request, timeout_s: float) -> HttpReply:
        """Return the reply to a request, of any status; EnvironmentFailed if there is none in time."""
        try:
            return exchange(self._opener, request, timeout_s, max_bytes=_MAX_BYTES)
        except Unreachable as error:
            raise EnvironmentFailed(f"cannot reach the server {self.url}: {error}") from error


class NemoGymEnvironment:
    """An episode in a session of its own: `/seed_session`, a POST for each call, and `/verify` at the end.

    The end is a completion without a call, one that was cut, or the last that there may be.
    """

    pure = False

    def __init__(self, session: NemoGymSession, max_invalid_calls: int, threads: CallThreads) -> None:
        self._session, self._max_invalid_calls, self._threads = session, max_invalid_calls, threads
        self._output: list[Mapping[str, Any]] = []
        self._num_turns = 0

    async def begin(self, task: Task) -> Reply:
        """Seed the session with the row, and begin with its messages and tools."""
        parameters = task.row.get(PARAMETERS)
        if not isinstance(parameters, Mapping):
            raise EnvironmentFailed(f"has a row without the object {PARAMETERS}; take rows of NeMo Gym")
        try:
            given = json.dumps({**parameters, "model": _MODEL}).encode()
            self._request = read_responses(given, _MODEL)
        except (AgentError, TypeError, ValueError) as error:
            raise EnvironmentFailed(f"cannot read {PARAMETERS} of its row: {error}") from None
        self._task = task
        tools = [Tool(tool, self._call(tool["function"]["name"])) for tool in self._request.tools]
        # One call after the other, since they change the session.
        rules = ToolRules(1, _MAX_CHARACTERS, self._max_invalid_calls)
        self._calls = ToolEnvironment(tools, rules, self._threads)
        await self._threads.run(lambda: self._session.ask("seed_session", task.row))
        return Reply(messages=self._request.messages, tools=self._request.tools)

    async def step(self, action: Action) -> Reply:
        """Run the calls of a completion, or have the episode verified."""
        if action.message is None and self._request.tools:
            raise EnvironmentFailed("has tools, but no calls are read; set environment.tool_format")
        self._num_turns += 1
        message, id = policy_message(action), f"resp_{self._num_turns}"
        response = write_response(message, action, self._request, id=id, created_s=0, model=_MODEL)
        self._output += [_as_nemo_gyms(item) for item in response["output"]]
        is_cut = action.finish_reason == "length"
        reply = Reply(done=True, calls=0) if is_cut else await self._calls.step(action)
        for one in reply.messages:
            if "tool_call_id" in one:
                result = {"call_id": one["tool_call_id"], "output": one["content"]}
                self._output.append({"type": "function_call_output", **result})
        is_last = reply.done or self._num_turns == self._task.max_turns
        if reply.invalid or not is_last:
            return reply
        whole = {**response, "output": self._output, "tools": self._task.row[PARAMETERS].get("tools") or []}
        given = {**self._task.row, "response": whole}
        found = await self._threads.run(lambda: self._session.ask("verify", given))
        score = reward_of({"reward": found.get("reward")})
        if score is None:
            raise EnvironmentFailed(f"got no finite number as the reward from {self._session.url}/verify")
        return Reply(done=True, score=score, calls=reply.calls, invalid_calls=reply.invalid_calls)

    def _call(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> str:
            # As in simple_agent, the policy reads an error of the tool, too.
            return self._session.post(name, arguments).body.decode("utf-8", "replace")

        return call


def nemo_gym_factory(url: str, *, max_invalid_calls: int) -> Callable[[], Environment]:
    """Return what makes a session for each episode, after the server has answered a first request.

    Raises:
        SetupError: it does not answer.
    """
    try:
        NemoGymSession(url).sent(Request(url), START_S)
    except EnvironmentFailed as error:
        raise SetupError(
            f"environment nemo_gym {error}; start the server, or correct environment.url"
        ) from error
    threads = CallThreads()
    return lambda: NemoGymEnvironment(NemoGymSession(url), max_invalid_calls, threads)


def _as_nemo_gyms(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an item of a response with reasoning where NeMo Gym has it: in the summary."""
    if item["type"] != "reasoning":
        return item
    return {**item, "summary": [{"type": "summary_text", "text": part["text"]} for part in item["content"]]}
