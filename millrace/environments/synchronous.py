"""Environments for a caller who waits: an engine in the calling thread, and evaluation. No torch."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from dataclasses import asdict

from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentHost,
    EnvironmentReply,
    StepEnvironment,
)

# Makes a host that calls the callback with each reply.
MakeHost = Callable[[Callable[[EnvironmentReply], object]], EnvironmentHost]


class SynchronousEnvironments:
    """Collects the replies to several steps at once, in the order of the steps.

    On several ranks, which make the same calls, rank 0 has the host and broadcasts the replies.

    Attributes:
        host: runs the environments; None on the other ranks.
    """

    def __init__(
        self, make_host: MakeHost, *, limit_s: float, broadcast: Callable[[str], str] | None, first: bool
    ) -> None:
        """Make the host on rank 0.

        Args:
            make_host: makes the host.
            limit_s: deadline of a reply; the host's own deadlines are shorter.
            broadcast: returns rank 0's text on every rank; None with one rank.
            first: whether this is rank 0.
        """
        self._replies: queue.SimpleQueue[EnvironmentReply] = queue.SimpleQueue()
        self._limit_s, self._broadcast = limit_s, broadcast
        self.host = make_host(self._replies.put) if first else None
        self._pending: list[StepEnvironment] = []

    @property
    def num_pending(self) -> int:
        """Number of steps whose replies are to be collected."""
        return len(self._pending)

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Start a step, or end an episode without a step in progress."""
        if isinstance(command, StepEnvironment):
            self._pending.append(command)
        if self.host is not None:
            self.host.execute(command)

    def collect(self) -> list[EnvironmentReply]:
        """Wait for the replies to all steps.

        Raises:
            TimeoutError: a reply did not arrive in time.
        """
        steps, self._pending = self._pending, []
        if not steps:
            return []
        replies: dict[str, EnvironmentReply] = {}
        while self.host is not None and len(replies) < len(steps):
            try:
                reply = self._replies.get(timeout=self._limit_s)
            except queue.Empty:
                missing = next(step.episode for step in steps if step.id not in replies)
                raise TimeoutError(
                    f"waited {self._limit_s:g} s for the environment of episode {missing}"
                ) from None
            replies[reply.id] = reply
        found = [replies[step.id] for step in steps if step.id in replies]
        if self._broadcast is None:
            return found
        packed = json.loads(self._broadcast(json.dumps([asdict(reply) for reply in found])))
        return [EnvironmentReply.from_json(one) for one in packed]

    def close(self) -> None:
        """Close the host."""
        if self.host is not None:
            self.host.close()
