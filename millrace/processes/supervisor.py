"""Supervisor of child processes: their start, their replies, and why one was lost."""

from __future__ import annotations

import json
import math
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from millrace.processes.child import ChildProcess, WorkerProgram
from millrace.processes.worker import START

_MAX_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True, eq=False)
class ChildReply:
    """The reply to a request."""

    child: ChildProcess
    id: int
    body: bytes


@dataclass(frozen=True, slots=True, eq=False)
class ChildLost:
    """A child was killed because it had ended, was late or broke the protocol.

    Attributes:
        child: its `pending` holds the requests that get no reply.
        reason: a clause about the child.
        late: whether a reply was overdue.
    """

    child: ChildProcess
    reason: str
    late: bool


class ChildFailed(RuntimeError):
    """A child cannot start, or too many in a row were lost before they had.

    Attributes:
        refusal: the reason that the worker gave; empty if it was lost.
    """

    def __init__(self, name: str, reason: str = "", *, refusal: str = "") -> None:
        super().__init__(f"{name} did not start: {refusal or reason}")
        self.refusal = refusal


class Supervisor:
    """Children of one program, used by one thread; only `end` may be called from others.

    `program` returns what the next child runs. The start may fail `max_restarts` times in a row.

    Attributes:
        children: those that are alive, in the order of their start.
        ending: whether `end` was called; children that start then end at once, until `close`.
    """

    def __init__(
        self,
        program: Callable[[], WorkerProgram],
        *,
        max_restarts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.children: list[ChildProcess] = []
        self.ending = False
        self._program, self._max_restarts, self._clock = program, max_restarts, clock
        self._make_poll = select.poll
        self._num_failed = 0

    def start(self) -> ChildProcess:
        """Start one more child; OSError if the system cannot."""
        child = ChildProcess(self._program(), self._clock)
        self.children.append(child)
        if self.ending:
            child.end()
        return child

    def wait(self, until_s: float = math.inf, *, wake: int | None = None) -> list[ChildReply | ChildLost]:
        """Wait for replies and lost children until a time of the clock or a deadline; at most an hour.

        It also ends once the descriptor `wake` can be read.

        Raises:
            ChildFailed: a child refused to start, or more than `max_restarts` in a row were lost before.
        """
        if not self.children and until_s == math.inf and wake is None:
            raise RuntimeError("there is no child to wait for")
        # Deadlines are compared with the time before the sockets are read: a reply may have waited unread.
        now_s = self._clock()
        poll, child_of = self._make_poll(), {}
        if wake is not None:
            poll.register(wake, select.POLLIN)
        for child in self.children:
            for descriptor, events in child.watch():
                poll.register(descriptor, events)
                child_of[descriptor] = child
        next_s = min([until_s, now_s + _MAX_WAIT_S, *(child.deadline_s for child in self.children)])
        found_ready = poll.poll(max(0.0, next_s - now_s) * 1000)
        ready = [child_of[descriptor] for descriptor, _ in found_ready if descriptor != wake]
        found: list[ChildReply | ChildLost] = []
        for child in dict.fromkeys(ready):
            for id, body, _ in child.exchange():
                if id != START:
                    found.append(ChildReply(child, id, body))
                    continue
                start = json.loads(body)
                if "refusal" in start:
                    self._remove(child)
                    raise ChildFailed(child.program.name, refusal=start["refusal"])
                child.facts, self._num_failed = start["facts"], 0
        for child in list(self.children):
            if reason := child.failure(now_s):
                self._remove(child)
                self._num_failed += not child.started
                if self._num_failed > self._max_restarts:
                    raise ChildFailed(child.program.name, reason)
                found.append(ChildLost(child, reason, child.deadline_s <= now_s))
        return found

    def end(self) -> None:
        """End all children from any thread: a wait of another thread reports the losses."""
        self.ending = True
        for child in list(self.children):
            child.end()

    def close(self) -> None:
        """Kill all children. More can be started afterwards."""
        while self.children:
            self._remove(self.children[-1])
        self.ending = False

    def _remove(self, child: ChildProcess) -> None:
        self.children.remove(child)
        child.kill()
