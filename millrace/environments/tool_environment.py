"""The environment `tools`: runs the tool calls of the policy, until it answers without one. No torch."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from millrace.data.tool_schema import types_of
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.tool_functions import Tool
from millrace.observability.plain import plain_text
from millrace.types import Action, Reply, Task

# Characters of the message of an exception.
MAX_ERROR = 500
# A function that hangs keeps its thread; with so many of them the worker ends, and another replaces it.
MAX_HANGING = 64


@dataclass(frozen=True, slots=True)
class ToolRules:
    """How calls are run.

    Attributes:
        parallel_calls: number of calls of a turn that run at once.
        max_characters: characters of a reply; the middle of a longer one is left out.
        max_invalid_calls: number of turns with a call that cannot be run; one more ends the episode.
    """

    parallel_calls: int
    max_characters: int
    max_invalid_calls: int


class CallThreads:
    """Runs functions that are not coroutines, each in a thread of its own."""

    def __init__(self, at_limit: Callable[[], object] = lambda: os._exit(1)) -> None:
        """Take what is called when too many threads hang; the default ends the process."""
        self._at_limit = at_limit
        self._left: list[threading.Thread] = []

    async def run(self, work: Callable[[], str]) -> str:
        """Return the result of a function, or raise what it raises."""
        future: Future[str] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="tool", daemon=True)
        thread.start()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._left = [one for one in self._left if one.is_alive()] + [thread]
            if len(self._left) >= MAX_HANGING:
                self._at_limit()
            raise


class ToolEnvironment:
    """An episode with tools: each call is answered by a message; a completion without a call ends it.

    The rewards of the recipe score the last completion. A call that cannot be run gets a reply that explains
    why; too many of them make the episode invalid. The state is `tool` after a call that was run, `invalid`
    after a turn without one.
    """

    def __init__(self, tools: Sequence[Tool], rules: ToolRules, threads: CallThreads) -> None:
        self._tools, self._rules, self._threads = {tool.name: tool for tool in tools}, rules, threads
        self.pure = all(tool.is_pure for tool in tools)
        self._num_invalid = 0

    async def begin(self, task: Task) -> Reply:
        """Show the tools, with the prompt of the row."""
        return Reply(tools=tuple(tool.definition for tool in self._tools.values()))

    async def step(self, action: Action) -> Reply:
        """Run the calls of a completion, all at once."""
        message = action.message or {}
        calls: list[Mapping[str, Any]] = message.get("tool_calls", [])
        num_invalid = int(action.status != "ok")
        self._num_invalid += num_invalid
        if self._num_invalid > self._rules.max_invalid_calls and num_invalid:
            reason = f"{self._num_invalid} turns had a call that cannot be run; the last: {action.error}"
            return Reply(done=True, invalid=plain_text(reason, MAX_ERROR), calls=0, invalid_calls=1)
        if not calls and not num_invalid:
            return Reply(done=True, calls=0)
        slots = asyncio.Semaphore(self._rules.parallel_calls)
        replies = list(await asyncio.gather(*(self._answered(call, slots) for call in calls)))
        if num_invalid:
            replies.append({"role": "tool", "content": f"error: {plain_text(action.error, MAX_ERROR)}"})
        return Reply(
            messages=tuple(replies),
            state="tool" if calls else "invalid",
            calls=len(calls),
            invalid_calls=num_invalid,
        )

    def save(self) -> dict[str, int] | None:
        """Return all that the episode depends on, unless a tool has something of its own for it."""
        if any(tool.close is not None for tool in self._tools.values()):
            return None
        return {"num_invalid": self._num_invalid}

    def load(self, task: Task, saved: Mapping[str, int]) -> None:
        """Go on from what `save` returned."""
        self._num_invalid = saved["num_invalid"]

    async def close(self) -> None:
        """Close the tools, each even if another raises."""
        closes = [tool.close for tool in self._tools.values() if tool.close is not None]
        await asyncio.gather(*map(_closed, closes))

    async def _answered(self, call: Mapping[str, Any], slots: asyncio.Semaphore) -> dict[str, Any]:
        tool = self._tools[call["function"]["name"]]
        arguments = _as_declared(call["function"]["arguments"], tool.definition)
        async with slots:
            if inspect.iscoroutinefunction(tool.function):
                text = await _awaited(tool.function, arguments)
            else:
                text = await self._threads.run(lambda: _result(tool.function, arguments))
        message = {"role": "tool", "name": tool.name, "tool_call_id": call["id"]}
        return message | shortened(text, self._rules.max_characters)


def shortened(text: str, max_characters: int) -> dict[str, Any]:
    """Return the content of a message; of a longer text, begin and end, and its `num_characters`."""
    if len(text) <= max_characters:
        return {"content": text}
    half = max_characters // 2
    return {"content": text[:half] + text[len(text) - half :], "num_characters": len(text)}


async def _closed(close: Callable[[], Any]) -> None:
    await (close() if inspect.iscoroutinefunction(close) else asyncio.to_thread(close))


async def _awaited(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    try:
        return _as_text(await function(**arguments))
    except EnvironmentFailed:
        raise
    except (Exception, SystemExit) as error:
        return _error(error)


def _result(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    try:
        return _as_text(function(**arguments))
    except EnvironmentFailed:
        raise
    except BaseException as error:  # SystemExit too: in this thread nothing else handles it
        return _error(error)


def _error(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # an exception of a user's own
        message = ""
    return plain_text(f"error: {type(error).__name__}: {message}".removesuffix(": "), MAX_ERROR)


def _as_text(result: Any) -> str:
    """Return a result as the policy reads it: text as it is, None as nothing, other values as JSON."""
    if result is None:
        return ""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")


def _as_declared(arguments: Mapping[str, Any], definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with whole numbers where the schema wants them: JSON's 3.0 is 3."""
    properties = definition["function"]["parameters"].get("properties", {})
    return {
        name: int(value)
        if isinstance(value, float) and value.is_integer() and _is_whole(properties.get(name))
        else value
        for name, value in arguments.items()
    }


def _is_whole(schema: Any) -> bool:
    types = types_of(schema)
    return "integer" in types and "number" not in types
