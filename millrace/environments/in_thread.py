"""Environments in the calling thread, for pure ones: each step is done when `step` returns. No torch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from millrace.environments.reply_tokens import ReplyEncoder, Tools
from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentFailed,
    EnvironmentReply,
    RunningEpisodes,
    StepEnvironment,
    call_here,
    saved_with,
)
from millrace.protocols import Environment
from millrace.types import Reply


class EnvironmentsInThread:
    """An `EnvironmentHost` without processes, deadlines or concurrency."""

    def __init__(
        self,
        make: Callable[[], Environment],
        encode: ReplyEncoder,
        on_reply: Callable[[EnvironmentReply], object],
    ) -> None:
        """Take what makes an environment, encodes its replies and receives them."""
        self._episodes, self._encode, self._on_reply = RunningEpisodes(make, call_here), encode, on_reply
        # Those that `begin` gave to the episodes in progress; kept only if calls are read.
        self._tools: dict[str, Tools] = {}

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Call the environment, then the callback."""
        if isinstance(command, CloseEpisode):
            self._tools.pop(command.episode, None)
            _finished(self._episodes.close(command.episode))
            return
        try:
            found = self._reply(command)
        except EnvironmentFailed as error:
            found = EnvironmentReply(command.id, failure=str(error))
        if found.failure:
            _finished(self._episodes.close(command.episode))
        if found.failure or found.done:
            self._tools.pop(command.episode, None)
        self._on_reply(found)

    def _reply(self, step: StepEnvironment) -> EnvironmentReply:
        """Return the reply; an episode that is not in progress here begins before its actions are read."""
        episode, actions = step.episode, step.actions
        state = None if step.saved is None else step.saved["state"]
        if self._encode.reads_calls:
            if actions and episode not in self._tools and step.saved is not None:
                self._tools[episode] = step.saved.get("tools", ())
            elif actions and episode not in self._tools:
                self._tools[episode] = _finished(self._episodes.reply(episode, step.task, ())).tools
            actions = tuple(self._encode.read(one, step.prompt, self._tools[episode]) for one in actions)
        reply: Reply = _finished(self._episodes.reply(episode, step.task, actions, state=state))
        tools = reply.tools if not actions else self._tools.get(episode, ())
        if self._encode.reads_calls:
            self._tools[episode] = tools
        saved = saved_with(_finished(self._episodes.save(episode)), tools)
        encoded = self._encode(step, reply, tools)
        return encoded if saved is None else replace(encoded, saved=saved)

    def close(self) -> None:
        """Do nothing: a pure environment owns nothing."""


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that must not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise EnvironmentFailed("waited in the trainer's thread; set environment.workers to 1 or more")
