"""Recorded event logs for replay: segments of a log, and the log of a replayed segment. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.engines.recorded import RecordedCommands, ReplayError
from millrace.eventlog.log import EventLog

# Event kinds that are inputs of the controller; all other events follow from them.
CAUSES = ("heard", "take", "send", "save")
# Event kinds that engines and blocking callers produce; the script has them.
ASIDE = ("took", "asked")


@dataclass(frozen=True, slots=True, eq=False)
class RunSegment:
    """A segment of a run: the work of one process.

    Attributes:
        lines: events of the log, in order.
        first: number of the first one in the file, counted from 1.
        script: recorded commands of its engines, which may extend beyond the last event.
        leaves_at: the batch after which the process saves and exits; 0 if the run finished.
    """

    lines: Sequence[Mapping[str, Any]]
    first: int
    script: RecordedCommands
    leaves_at: int

    @property
    def threads(self) -> Sequence[int]:
        """Number of threads of each rank.

        Raises:
            ReplayError: the log does not have it.
        """
        for event in self.lines:
            if event["kind"] == "threads":
                return list(event["ranks"])
        raise ReplayError("its event log does not say how many threads its ranks had; it is not whole")

    def over(self, stage: str, step: int) -> bool:
        """Return whether a run at this step has reached the end of the segment."""
        return stage == "reinforcement" and step == self.leaves_at > 0


def parts_of(
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
    begins = [0, *(place for place, event in enumerate(events) if event["kind"] == "resume"), len(events)]
    parts = []
    for begin, after in zip(begins, begins[1:], strict=False):
        if begin < end:
            taken = sum(place < min(after, end) for place in takes)
            leaves_at = 0 if finished and after == len(events) else taken
            lines = events[begin : min(after, end)]
            parts.append(RunSegment(lines, begin + 1, RecordedCommands(events[begin:after]), leaves_at))
    return parts


def _before(events: Sequence[Mapping[str, Any]], take: int) -> int:
    """Return where to stop before a batch is taken: the last place that only earlier events determine.

    In synchronous training no event is handled between a weight update and the wait for the next batch.
    """
    if not take or events[0]["rules"]["staleness"]:
        return take
    publishes = [place for place in range(take) if events[place]["kind"] == "publish"]
    last = publishes[-1] if publishes else take
    return next((place for place in range(last, take) if events[place]["kind"] == "heard"), take)


class RecordedLog(EventLog):
    """The log of a replayed segment: every event must equal the recorded one.

    The position in the recorded log is the only clock: callers poll `reached` for their turn.
    """

    def __init__(self, path: Path, clock: Callable[[], float], part: RunSegment) -> None:
        """Start at the first event of the segment.

        Args:
            path: see `EventLog`.
            clock: see `EventLog`.
            part: the segment to replay.
        """
        super().__init__(path, clock)
        self._part, self._next = part, 0

    @property
    def replays(self) -> bool:
        """True: this is a replay."""
        return True

    @property
    def head(self) -> Mapping[str, Any] | None:
        """The next recorded event; None at the end."""
        at = self._next
        return self._part.lines[at] if at < len(self._part.lines) else None

    @property
    def ended(self) -> bool:
        """Whether the replay has reached the end of the segment."""
        return self.head is None

    @property
    def place(self) -> str:
        """The position of the replay, for messages."""
        return f"event {self._part.first + self._next} of the run's event log"

    @property
    def script(self) -> RecordedCommands:
        """The recorded commands of the engines."""
        return self._part.script

    def reached(self, kind: str) -> bool:
        """Return whether this action is next in the log; False while recorded events must come first.

        Raises:
            ReplayError: the run took another action here.
        """
        head = self.head
        if head is None:
            if kind in ("hold", "save"):
                return True
            raise ReplayError(f"the replay is not the run: its log ends before this {kind}")
        if head["kind"] not in (kind, "heard"):
            raise ReplayError(f"{self.place}: the run did {head['kind']} here, and the replay does {kind}")
        return bool(head["kind"] == kind)

    def add(self, kind: str, /, **facts: Any) -> None:
        """Append one event, which must be the run's next one.

        Raises:
            ReplayError: it is not; the message has the difference.
        """
        head = self.head
        if head is not None:
            told = {"kind": kind, **json.loads(json.dumps(facts))}
            differ = [
                name for name in {**head, **told} if name != "time_s" and head.get(name) != told.get(name)
            ]
            if differ:
                name = differ[0]
                raise ReplayError(
                    f"{self.place}, {head['kind']}: {name} was {head.get(name)!r} in the run and is "
                    f"{told.get(name)!r} in the replay"
                )
        super().add(kind, **facts)
        self._next += head is not None
        while (aside := self.head) is not None and aside["kind"] in ASIDE:
            super().add(aside["kind"], **{k: v for k, v in aside.items() if k not in ("kind", "time_s")})
            self._next += 1
