"""Recorded event logs for replay: segments of a log, and the log of a replayed segment.

An engine is a deterministic function of its weights, its commands and the turns before which it starts them
(see `engine_worker.EngineWorker`), so a replay needs `CommandsStarted` and `BlockingRequest` of every engine.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.engines.subprocesses import BlockingRequests, request_number
from millrace.eventlog.log import EventLog
from millrace.rollout.backend import GenerateRequest
from millrace.types import Completion


class ReplayError(RuntimeError):
    """A replay diverged from its run, or a run cannot be replayed; the message names the place."""


@dataclass(frozen=True, slots=True, eq=False)
class RunSegment:
    """A segment of a run: the work of one process.

    Attributes:
        events: events of the log, in order.
        first: number of the first one in the file, counted from 1.
        last_step: the batch after which the process saves and exits; 0 if the run finished.
        later: further events of the process, which are not replayed; but its engines may get to what they
            report there.
    """

    events: Sequence[Mapping[str, Any]]
    first: int
    last_step: int
    later: Sequence[Mapping[str, Any]] = ()

    def turns(self) -> dict[str, list[tuple[int, list[str]]]]:
        """Return, for each engine, pairs of a turn and the commands that it started before it."""
        turns: dict[str, list[tuple[int, list[str]]]] = {}
        for event in self._reported("commands_started"):
            turns.setdefault(event["engine"], []).extend(map(tuple, event["commands"]))
        return turns

    def blocking_requests(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the engine and the numbers of all blocking requests, in order."""
        return ((event["engine"], event["requests"]) for event in self._reported("blocking_request"))

    def _reported(self, kind: str) -> Iterator[Mapping[str, Any]]:
        received = (event["events"] for event in (*self.events, *self.later) if "events" in event)
        return (event for events in received for event in events if event["kind"] == kind)

    @property
    def threads(self) -> Sequence[int]:
        """Number of threads of each rank.

        Raises:
            ReplayError: the log does not have it.
        """
        for event in self.events:
            if event["kind"] == "threads":
                return list(event["ranks"])
        raise ReplayError("its event log does not say how many threads its ranks had; it is not whole")

    def over(self, stage: str, step: int) -> bool:
        """Return whether a run at this step has reached the end of the segment."""
        return stage == "reinforcement" and step == self.last_step > 0


def segments_of(
    events: Sequence[Mapping[str, Any]], *, finished: bool, until: int | None = None
) -> list[RunSegment]:
    """Split a log into segments: before each `resume`, and at the end of the replay.

    Args:
        events: of the log.
        finished: whether the run finished; if not, its last batch is replayed only if it was saved.
        until: number of batches to replay; None for all.

    Raises:
        ReplayError: the log has fewer batches, or none.
    """
    end = len(events)
    takes = [place for place, event in enumerate(events) if event["kind"] == "take"]
    if until is not None and until < len(takes):
        end, finished = _before(events, takes[until]), False
    elif not finished:
        last = takes[-1] if takes else 0
        saves = [place + 1 for place, event in enumerate(events) if event["kind"] == "save" and place > last]
        end = saves[-1] if saves else _before(events, last)
    num_batches = sum(place < end for place in takes)
    if until is not None and until > num_batches:
        raise ReplayError(f"its event log has {num_batches} whole batches, so nothing begins after {until}")
    if not num_batches:
        raise ReplayError("its event log has no whole batch to replay")
    starts = [0, *(place for place, event in enumerate(events) if event["kind"] == "resume"), len(events)]
    segments = []
    for begin, after in zip(starts, starts[1:], strict=False):
        if begin < end:
            taken = sum(place < min(after, end) for place in takes)
            last_step = 0 if finished and after == len(events) else taken
            chosen, later = events[begin : min(after, end)], events[max(begin, end) : after]
            segments.append(RunSegment(chosen, begin + 1, last_step, later))
    return segments


def _before(events: Sequence[Mapping[str, Any]], take: int) -> int:
    """Return where to stop before a batch is taken: the last place that only earlier events determine.

    In synchronous training no event is handled between a weight update and the wait for the next batch.
    """
    if not take or events[0]["rules"]["staleness"]:
        return take
    updates = [place for place in range(take) if events[place]["kind"] == "weights_updated"]
    last = updates[-1] if updates else take
    return next((place for place in range(last, take) if events[place]["kind"] == "events_received"), take)


class RecordedBlockingRequests(BlockingRequests):
    """Blocking requests of a replay, each of which goes to the recorded engine."""

    def __init__(self, recorded: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Take the engines and numbers of the recorded ones, in order."""
        super().__init__()
        self._recorded = deque(recorded)
        # The engine whose response was received for each request: the last one in the log.
        self._served = {number: engine for engine, numbers in self._recorded for number in numbers}

    def place(
        self, missing: list[GenerateRequest], newest: Callable[[], str]
    ) -> tuple[str, list[GenerateRequest]]:
        """Return the engine of the next recorded request, and those that it got.

        Raises:
            ReplayError: the run submitted others.
        """
        engine, numbers = self._recorded.popleft() if self._recorded else ("", [])
        chosen = [request for request in missing if request_number(request.id) in numbers]
        if not chosen or len(chosen) != len(numbers):
            raise ReplayError(
                f"the replay is not the run: {len(missing)} blocking requests are unfinished, and the run "
                f"submitted {len(numbers)} to {engine or 'no engine'}"
            )
        return engine, chosen

    def complete(self, engine: str, id: str, result: Completion | ValueError) -> bool:
        """Store a result, unless the run lost the engine before it received this one."""
        return self._served.get(request_number(id), engine) != engine or super().complete(engine, id, result)

    def is_pending(self, engine: str) -> bool:
        """Whether an engine has blocking requests ahead of it, or has yet to respond to some."""
        unfinished = (self._served.get(request_number(id)) for id in self.unfinished)
        return engine in unfinished or engine in [name for name, _ in list(self._recorded)]


class RecordedLog(EventLog):
    """The log of a replayed segment: every event must equal the recorded one.

    The position in the recorded log is the only clock: callers poll `reached` for their turn.
    """

    def __init__(self, path: Path, clock: Callable[[], float], segment: RunSegment) -> None:
        """Start at the first event of the segment; see `EventLog`."""
        super().__init__(path, clock)
        self._segment, self._next = segment, 0

    @property
    def replays(self) -> bool:
        """True: this is a replay."""
        return True

    @property
    def head(self) -> Mapping[str, Any] | None:
        """The next recorded event; None at the end."""
        at = self._next
        return self._segment.events[at] if at < len(self._segment.events) else None

    @property
    def ended(self) -> bool:
        """Whether the replay has reached the end of the segment."""
        return self.head is None

    @property
    def place(self) -> str:
        """The position of the replay, for messages."""
        return f"event {self._segment.first + self._next} of the run's event log"

    @property
    def segment(self) -> RunSegment:
        """The segment to replay."""
        return self._segment

    def reached(self, kind: str) -> bool:
        """Return whether this action is next in the log; False while recorded events must come first.

        Raises:
            ReplayError: the run took another action here.
        """
        head = self.head
        if head is None:
            if kind in ("abort_in_flight", "save"):
                return True
            raise ReplayError(f"the replay is not the run: its log ends before this {kind}")
        if head["kind"] not in (kind, "events_received"):
            raise ReplayError(f"{self.place}: the run did {head['kind']} here, and the replay does {kind}")
        return bool(head["kind"] == kind)

    def add(self, kind: str, /, **fields: Any) -> None:
        """Append one event, which must be the run's next one.

        Raises:
            ReplayError: it is not; the message has the difference.
        """
        head = self.head
        if head is not None:
            new = {"kind": kind, **json.loads(json.dumps(fields))}
            differ = [
                name for name in {**head, **new} if name != "time_s" and head.get(name) != new.get(name)
            ]
            if differ:
                name = differ[0]
                raise ReplayError(
                    f"{self.place}, {head['kind']}: {name} was {head.get(name)!r} in the run and is "
                    f"{new.get(name)!r} in the replay"
                )
        super().add(kind, **fields)
        self._next += head is not None
        # The clock of the run stopped an engine; the replay has no clock.
        while (head := self.head) is not None and head.get("command") == "stop_engine":
            own = {name: value for name, value in head.items() if name not in ("kind", "time_s")}
            super().add("command", **own)
            self._next += 1
