"""Environments in the calling thread, for pure ones: each step is done when `step` returns. No torch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from millrace.environments.reply_tokens import ReplyEncoder
from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentFailed,
    EnvironmentReply,
    RunningEpisodes,
    StepEnvironment,
    call_here,
)
from millrace.protocols import Environment


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

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Call the environment, then the callback."""
        if isinstance(command, CloseEpisode):
            _finished(self._episodes.close(command.episode))
            return
        try:
            reply = _finished(self._episodes.reply(command.episode, command.task, command.actions))
        except EnvironmentFailed as error:
            self._on_reply(EnvironmentReply(command.id, failure=str(error)))
            return
        found = self._encode(command, reply)
        if found.failure:
            _finished(self._episodes.close(command.episode))
        self._on_reply(found)

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
