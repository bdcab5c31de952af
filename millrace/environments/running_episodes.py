"""Steps of episodes as data, and the environments of the episodes in progress. No torch."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any, Protocol, cast

from millrace.data.chat import read_messages
from millrace.data.functions import explain
from millrace.data.rows import DataError
from millrace.data.tool_schema import read_tools
from millrace.observability.plain import plain_text
from millrace.protocols import Environment, SavableEnvironment
from millrace.types import ROOT, Action, Prompt, Reply, Task

# What an episode goes on from elsewhere: `state`, a JSON value that `save` of the environment returned, and
# `tools`, where `begin` gave some that actions are read with.
Saved = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepEnvironment:
    """Begin an episode, or reply to its newest action; ends in `EnvironmentReply`.

    Attributes:
        id: unique.
        episode: unique for each attempt of each sample.
        prompt: of the group.
        task: what the environment is given.
        actions: every action of the episode in order, the newest last; empty to begin.
        saved: `EnvironmentReply.saved` of the reply before the newest action; None without one.
    """

    id: str
    episode: str
    prompt: Prompt
    task: Task
    actions: tuple[Action, ...]
    saved: Saved | None = None


@dataclass(frozen=True, slots=True)
class CloseEpisode:
    """End an episode before its environment does; nothing follows."""

    episode: str


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """The reply to a step, in tokens.

    Attributes:
        id: of the step.
        token_ids: what the policy reads next.
        reward: see `types.Reply`, also for the next three.
        state: of the next action.
        done: whether the episode has ended.
        score: of the episode.
        failure: why the environment could not reply; the episode has ended then. Empty if it did.
        invalid: see `types.Reply`, also for the next two.
        calls: number of tool calls that were run.
        invalid_calls: number of those that could not be run.
        progress: see `types.Reply`, also for the next two.
        after: index of the completion that the tokens follow.
        refused: number of requests for a further branch that were refused.
        saved: the environment after this reply; None if it has ended or cannot be saved.
    """

    id: str
    token_ids: tuple[int, ...] = ()
    reward: float = 0.0
    state: str = ""
    done: bool = False
    score: float = 0.0
    failure: str = ""
    invalid: str = ""
    calls: int | None = None
    invalid_calls: int = 0
    progress: float | None = None
    after: int | None = None
    refused: int = 0
    saved: Saved | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EnvironmentReply:
        """Return the reply of which `asdict` gave these fields, written to JSON and read again."""
        return cls(**{**fields, "token_ids": tuple(fields["token_ids"])})


class EnvironmentFailed(Exception):
    """An environment raised, replied nonsense or was lost; the message is a clause about it."""


class EnvironmentHost(Protocol):
    """Where environments run. Replies go to a callback, which may be called by another thread."""

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Start a step, which ends in one call of the callback unless its episode is closed; or close one."""

    def close(self) -> None:
        """End all episodes and the processes of this host."""


_MAX_REASON = 2000
# Bytes of JSON of a saved environment, which is logged beside each reply.
MAX_SAVED_BYTES = 32 << 10
# Calls a method of an environment, for example in another thread, and awaits an awaitable result.
Call = Callable[..., Awaitable[Any]]


async def call_here(method: Callable[..., Any], *given: Any) -> Any:
    """Call a method in this thread."""
    found = method(*given)
    return await found if isawaitable(found) else found


@dataclass(slots=True)
class _Running:
    environment: Environment
    num_steps: int = 0
    # That `begin` gave; None of one that goes on from a saved state.
    tools: Sequence[Mapping[str, Any]] | None = None
    is_savable: bool = field(init=False)

    def __post_init__(self) -> None:
        # Once for an episode: to look for the methods of a protocol takes as long as a small game's reply.
        self.is_savable = isinstance(self.environment, SavableEnvironment)


class _Refusable(Protocol):
    """An environment of programs, which can do without the completion that its newest reply asks for."""

    async def refuse(self) -> Reply:
        """Refuse the newest reply, and return another one."""


class RunningEpisodes:
    """The environments of the episodes in progress.

    An episode that is not in progress here, because its worker was lost or the run was resumed, goes on from
    its saved state, or is repeated from its actions if its environment is pure.
    """

    def __init__(self, make: Callable[[], Environment], call: Call) -> None:
        self._make, self._call = make, call
        self._running: dict[str, _Running] = {}

    async def reply(
        self,
        episode: str,
        task: Task,
        actions: Sequence[Action],
        *,
        is_repeated: bool = False,
        state: Any = None,
    ) -> Reply:
        """Return the checked reply to the newest action; EnvironmentFailed if there is none.

        `is_repeated` means that the episode was in progress elsewhere before. `state` is what `save` returned
        there before the newest action; None if it could not be saved.
        """
        what = f"step {len(actions)}" if actions else "begin"
        return await self._ended(
            episode, what, self._reply(episode, task, actions, is_repeated or bool(actions), state)
        )

    async def refuse(self, episode: str) -> Reply:
        """Return another reply to the newest action, in place of one whose branch would be too long.

        EnvironmentFailed if there is none.
        """
        return await self._ended(episode, "refuse", self._refuse(episode))

    async def _ended(self, episode: str, what: str, reply: Awaitable[Reply]) -> Reply:
        """Close the episode if the reply ends it; EnvironmentFailed if there is none."""
        try:
            found = await reply
        except (Exception, SystemExit) as error:
            await self.close(episode)
            reason = str(error) if isinstance(error, EnvironmentFailed) else f"{what} raised {explain(error)}"
            raise EnvironmentFailed(plain_text(reason, _MAX_REASON)) from error
        if found.done:
            await self.close(episode)
        return found

    async def _refuse(self, episode: str) -> Reply:
        running = self._running[episode]
        reply = await self._call(cast("_Refusable", running.environment).refuse)
        return checked(reply, "refuse", num_actions=running.num_steps)

    async def save(self, episode: str) -> Any:
        """Return a JSON value that an episode in progress can go on from elsewhere; None if it cannot.

        EnvironmentFailed if `save` of its environment raises, or returns what cannot be kept.
        """
        running = self._running.get(episode)
        if running is None or not running.is_savable:
            return None
        try:
            return _checked_state(await self._call(cast("SavableEnvironment", running.environment).save))
        except (Exception, SystemExit) as error:
            await self.close(episode)
            reason = str(error) if isinstance(error, EnvironmentFailed) else f"save raised {explain(error)}"
            raise EnvironmentFailed(plain_text(reason, _MAX_REASON)) from error

    async def _reply(
        self, episode: str, task: Task, actions: Sequence[Action], is_repeated: bool, state: Any
    ) -> Reply:
        running = self._running.get(episode)
        if running is None and state is not None and actions:
            environment = self._make()
            assert isinstance(environment, SavableEnvironment)
            running = self._running[episode] = _Running(environment, len(actions) - 1)
            try:
                await self._call(environment.load, task, state)
            except (Exception, SystemExit) as error:
                raise EnvironmentFailed(f"load raised {explain(error)}") from error
        elif running is None:
            running = _Running(self._make())
            if is_repeated and not is_pure(running.environment):
                raise EnvironmentFailed("was lost with its worker; it is not pure, so it is not repeated")
            self._running[episode] = running
            reply = checked(await self._call(running.environment.begin, task), "begin")
            if reply.done:
                raise EnvironmentFailed("ended the episode in begin, before the first completion")
            running.tools = reply.tools
        for action in actions[running.num_steps :]:
            running.num_steps += 1
            reply = checked(
                await self._call(running.environment.step, action), "step", num_actions=running.num_steps
            )
            changes = running.tools is not None and reply.tools != running.tools
            if changes and reply.after is not None and is_pure(running.environment):
                # A repeated episode has its actions read by the tools of its begin.
                raise EnvironmentFailed("is pure and gave a branch other tools than begin; give it the same")
        return reply

    async def close(self, episode: str) -> None:
        """Close the environment of an episode, if it is in progress; errors of its `close` are ignored."""
        running = self._running.pop(episode, None)
        close = None if running is None else getattr(running.environment, "close", None)
        if close is None:
            return
        try:
            await self._call(close)
        except (Exception, SystemExit) as error:
            # The episode is over, and its result stands.
            warnings.warn(f"close of an environment raised {explain(error)}", stacklevel=2)


def is_pure(environment: Environment) -> bool:
    """Whether the replies of an environment depend on its task and its actions alone."""
    return bool(getattr(environment, "pure", False))


def saved_with(state: Any, tools: Sequence[Mapping[str, Any]]) -> Saved | None:
    """Return the saved state of an episode; None without a state."""
    if state is None:
        return None
    return {"state": state, "tools": list(tools)} if tools else {"state": state}


def _checked_state(state: Any) -> Any:
    """Return what `save` returned as JSON reads it; EnvironmentFailed if it is no JSON or too large."""
    try:
        found = _plain(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"returned a state from save that is no JSON: {error}") from None
    size = len(json.dumps(found, ensure_ascii=False).encode())
    if size > MAX_SAVED_BYTES:
        raise EnvironmentFailed(
            f"returned {size} bytes of JSON from save, and at most {MAX_SAVED_BYTES} are kept; save less, or "
            "return None"
        )
    return found


def checked(reply: Any, method: str, *, num_actions: int = 0) -> Reply:
    """Return a valid reply to the last of so many actions; EnvironmentFailed otherwise."""
    if not isinstance(reply, Reply):
        raise EnvironmentFailed(f"returned {type(reply).__name__} from {method}, not a Reply")
    text: object = reply.text
    if text is not None and not isinstance(text, str):
        raise EnvironmentFailed(f"replied with text of type {type(text).__name__} in {method}")
    for name in ("reward", "score", "progress"):
        value: object = getattr(reply, name)
        if name == "progress" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentFailed(f"replied with {name} {value!r} in {method}, not a finite number")
    state, done, invalid = [getattr(reply, name) for name in ("state", "done", "invalid")]
    if not isinstance(state, str) or not isinstance(done, bool):
        raise EnvironmentFailed(f"replied in {method} with a state that is no text, or done that is no bool")
    if not isinstance(invalid, str) or (invalid and not done):
        raise EnvironmentFailed(f"replied in {method} with invalid that is no text, or without done")
    for name in ("calls", "invalid_calls", "refused"):
        number: object = getattr(reply, name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise EnvironmentFailed(f"replied with {name} {number!r} in {method}, not a number of calls")
    _check_place(reply, method, num_actions)
    if reply.messages or reply.tools:
        return _with_messages(reply, method)
    return reply


def _check_place(reply: Reply, method: str, num_actions: int) -> None:
    """Raise EnvironmentFailed if a reply follows no completion, or is text and tokens."""
    after: object = reply.after
    if after is not None:
        if isinstance(after, bool) or not isinstance(after, int) or not ROOT <= after < num_actions:
            raise EnvironmentFailed(
                f"replied with after {after!r} in {method}; it is {ROOT}, or the index of one of the "
                f"{num_actions} completions"
            )
        if reply.done:
            raise EnvironmentFailed(f"replied in {method} with after to an episode that is done")
    tokens: Any = reply.token_ids
    if tokens is not None:
        if reply.messages or reply.text is not None:
            raise EnvironmentFailed(f"replied with tokens and a text or messages in {method}; give one")
        if not isinstance(tokens, tuple) or not all(type(one) is int and one >= 0 for one in tokens):
            raise EnvironmentFailed(f"replied with token_ids in {method} that are no tuple of tokens")
    verbatim: object = reply.verbatim
    if not isinstance(verbatim, bool) or (verbatim and reply.text is None):
        raise EnvironmentFailed(f"replied in {method} with verbatim that is no bool, or without a text")


def _with_messages(reply: Reply, method: str) -> Reply:
    """Return the reply with its messages and tools as JSON values, or raise EnvironmentFailed."""
    if reply.messages and reply.text is not None:
        raise EnvironmentFailed(f"replied with both text and messages in {method}; give one of them")
    if reply.tools and method != "begin" and reply.after is None:
        raise EnvironmentFailed(
            f"replied with tools in {method}; only begin may give tools, or a reply with after"
        )
    try:
        messages = read_messages(_plain(reply.messages), "its messages") if reply.messages else ()
        tools = read_tools(_plain(reply.tools), "its tools")
    except (DataError, TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(
            f"replied with messages or tools that cannot be read in {method}: {error}"
        ) from None
    return replace(reply, messages=tuple(messages), tools=tools)


def _plain(value: Any) -> Any:
    """Return a value as JSON reads it back; halves of characters are replaced."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_dict)
    return json.loads(text.encode("utf-8", "replace"))


def _as_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def bounded(reply: Reply, max_characters: int) -> Reply:
    """Cut the texts of a reply to so many characters in all, which no episode has room for."""
    text = None if reply.text is None else reply.text[:max_characters]
    messages, left = [], max_characters
    for message in reply.messages:
        content = (message["content"] or "")[:left]
        left -= len(content)
        messages.append(
            message if len(content) == len(message["content"] or "") else {**message, "content": content}
        )
    invalid = plain_text(reply.invalid, _MAX_REASON)
    token_ids = None if reply.token_ids is None else reply.token_ids[:max_characters]
    return replace(
        reply,
        text=text,
        state=reply.state[:max_characters],
        messages=tuple(messages),
        token_ids=token_ids,
        invalid=invalid,
    )
