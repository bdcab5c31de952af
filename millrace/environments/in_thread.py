"""Environments in the calling thread, for pure ones: each step is done when `step` returns. No torch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from millrace.environments.reply_tokens import ReplyEncoder
from millrace.environments.running_episodes import (
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

    def step(self, step: StepEnvironment) -> None:
        """Call the environment, then the callback."""
        try:
            reply = _finished(self._episodes.reply(step.episode, step.task, step.actions))
        except EnvironmentFailed as error:
            self._on_reply(EnvironmentReply(step.id, failure=str(error)))
        else:
            self._on_reply(self._encode(step, reply))

    def close_episode(self, episode: str) -> None:
        """Close the environment of an episode."""
        _finished(self._episodes.close(episode))

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
