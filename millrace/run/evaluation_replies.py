"""Environments of evaluations, whose replies are kept for a replay, or are recorded ones. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentHost,
    EnvironmentReply,
    StepEnvironment,
)
from millrace.environments.synchronous import MakeHost


class EvaluationReplies:
    """An `EnvironmentHost` over another one, which is made at the first step that needs it."""

    def __init__(self, make_host: MakeHost, on_reply: Callable[[EnvironmentReply], object]) -> None:
        self._make_host, self._on_reply = make_host, on_reply
        self._own: EnvironmentHost | None = None
        self._given: EnvironmentHost | None = None
        # Of the evaluation in progress; None outside of one.
        self._replies: list[EnvironmentReply] | None = None

    def begin(self, make_given: MakeHost | None) -> None:
        """Begin an evaluation; `make_given` makes the host of this one in a replay."""
        self._replies = []
        self._given = None if make_given is None else make_given(self._received)

    def end(self) -> list[EnvironmentReply]:
        """End the evaluation; return its replies, sorted by id."""
        given, self._given = self._given, None
        if given is not None:
            given.close()
        replies, self._replies = self._replies or [], None
        return sorted(replies, key=lambda reply: reply.id)

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Run a step, or end an episode."""
        if self._given is not None:
            self._given.execute(command)
            return
        if self._own is None:
            self._own = self._make_host(self._received)
        self._own.execute(command)

    def close(self) -> None:
        """Close the hosts."""
        self.end()
        if self._own is not None:
            self._own.close()

    def _received(self, reply: EnvironmentReply) -> None:
        if self._replies is not None:
            self._replies.append(replace(reply, saved=None))  # no evaluation is resumed
        self._on_reply(reply)
