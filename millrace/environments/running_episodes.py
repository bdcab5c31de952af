"""Steps of episodes as data, and the environments of the episodes in progress. No torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Protocol

from millrace.data.functions import explain
from millrace.observability.plain import plain_text
from millrace.protocols import Environment
from millrace.types import Action, Prompt, Reply, Task


@dataclass(frozen=True, slots=True)
class StepEnvironment:
    """Begin an episode, or reply to its newest action; ends in `EnvironmentReply`.

    Attributes:
        id: unique.
        episode: unique for each attempt of each sample.
        prompt: of the group.
        task: what the environment is given.
        actions: every action of the episode in order, the newest last; empty to begin.
    """

    id: str
    episode: str
    prompt: Prompt
    task: Task
    actions: tuple[Action, ...]


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
    """

    id: str
    token_ids: tuple[int, ...] = ()
    reward: float = 0.0
    state: str = ""
    done: bool = False
    score: float = 0.0
    failure: str = ""

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


class RunningEpisodes:
    """The environments of the episodes in progress.

    An episode that is not in progress here, because its worker was lost or the run was resumed, is repeated
    from its actions if its environment is pure.
    """

    def __init__(self, make: Callable[[], Environment], call: Call) -> None:
        self._make, self._call = make, call
        self._running: dict[str, _Running] = {}

    async def reply(self, episode: str, task: Task, actions: Sequence[Action]) -> Reply:
        """Return the checked reply to the newest action; EnvironmentFailed if there is none."""
        try:
            found = await self._reply(episode, task, actions)
        except Exception as error:
            await self.close(episode)
            what = f"step {len(actions)}" if actions else "begin"
            reason = str(error) if isinstance(error, EnvironmentFailed) else f"{what} raised {explain(error)}"
            raise EnvironmentFailed(plain_text(reason, _MAX_REASON)) from error
        if found.done:
            await self.close(episode)
        return found

    async def _reply(self, episode: str, task: Task, actions: Sequence[Action]) -> Reply:
        running = self._running.get(episode)
        if running is None:
            running = _Running(self._make())
            if actions and not is_pure(running.environment):
                raise EnvironmentFailed("was lost with its worker; it is not pure, so it is not repeated")
            self._running[episode] = running
            reply = checked(await self._call(running.environment.begin, task), "begin")
            if reply.done:
                raise EnvironmentFailed("ended the episode in begin, before the first completion")
        for action in actions[running.num_steps :]:
            reply = checked(await self._call(running.environment.step, action), "step")
            running.num_steps += 1
        return reply

    async def close(self, episode: str) -> None:
        """Close the environment of an episode, if it is in progress; errors of its `close` are ignored."""
        running = self._running.pop(episode, None)
        close = None if running is None else getattr(running.environment, "close", None)
        if close is None:
            return
        try:
            await self._call(close)
        except Exception as error:
            # The episode is over, and its result stands.
            warnings.warn(f"close of an environment raised {explain(error)}", stacklevel=2)


def is_pure(environment: Environment) -> bool:
    """Whether the replies of an environment depend on its task and its actions alone."""
    return bool(getattr(environment, "pure", False))


def checked(reply: Any, method: str) -> Reply:
    """Return a valid reply; EnvironmentFailed otherwise."""
    if not isinstance(reply, Reply):
        raise EnvironmentFailed(f"returned {type(reply).__name__} from {method}, not a Reply")
    text: object = reply.text
    if text is not None and not isinstance(text, str):
        raise EnvironmentFailed(f"replied with text of type {type(text).__name__} in {method}")
    for name in ("reward", "score"):
        value: object = getattr(reply, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentFailed(f"replied with {name} {value!r} in {method}, not a finite number")
    state, done = [getattr(reply, name) for name in ("state", "done")]
    if not isinstance(state, str) or not isinstance(done, bool):
        raise EnvironmentFailed(f"replied in {method} with a state that is no text, or done that is no bool")
    return reply
