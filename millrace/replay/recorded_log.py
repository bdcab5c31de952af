"""A run's event log as what is to happen: parts of it, and the log of a run that repeats one. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.engines.recorded import ReplayError, Script
from millrace.eventlog.log import EventLog

# What the trainer does or hears; everything else in the log follows from it.
CAUSES = ("heard", "take", "send", "save")
# What engines and callers did on their own; the script has it.
ASIDE = ("took", "asked")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one process did of a run.

    Attributes:
        lines: of the event log, in order.
        first: number of the first one in the file, counted from 1.
        script: of its engines, which may go beyond the last line.
        leaves_at: the batch after which all is saved and the process leaves; 0 where the run was finished.
    """

    lines: Sequence[Mapping[str, Any]]
    first: int
    script: Script
    leaves_at: int

    @property
    def threads(self) -> Sequence[int]:
        """Those of each rank.

        Raises:
            ReplayError: the log does not tell.
        """
        for event in self.lines:
            if event["kind"] == "threads":
                return list(event["ranks"])
        raise ReplayError("its event log does not say how many threads its ranks had; it is not whole")

    def over(self, stage: str, step: int) -> bool:
        """Whether a run that is there has to leave."""
        return stage == "reinforcement" and step == self.leaves_at > 0


def parts_of(events: Sequence[Mapping[str, Any]], *, finished: bool, until: int | None = None) -> list[Part]:
    """Cut a log where processes ended: before each `resume`, and where it is to end.

    Args:
        events: of the log.
        finished: whether the run was; if not, its last batch is repeated only if it was saved.
        until: batches to repeat; None for all.

    Raises:
        ReplayError: there are not so many batches, or none.
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
            parts.append(Part(lines, begin + 1, Script(events[begin:after]), leaves_at))
    return parts


def _before(events: Sequence[Mapping[str, Any]], take: int) -> int:
    """Where to leave before a batch is taken: as late as all is still decided by what came before.

    Where sampling and training take turns, nothing is heard from a publish to the wait for the next batch.
    """
    if not take or events[0]["rules"]["staleness"]:
        return take
    publishes = [place for place in range(take) if events[place]["kind"] == "publish"]
    last = publishes[-1] if publishes else take
    return next((place for place in range(last, take) if events[place]["kind"] == "heard"), take)


class Replayed(EventLog):
    """The log of a run that repeats a part of another one: every event must be as it was there.

    What the log says next is the only clock: who waits for his turn asks `reached`.
    """

    def __init__(self, path: Path, clock: Callable[[], float], part: Part) -> None:
        """Nothing was repeated; see `EventLog` for the file and its clock."""
        super().__init__(path, clock)
        self._part, self._next = part, 0

    @property
    def replays(self) -> bool:
        """What is to happen is in the log."""
        return True

    @property
    def head(self) -> Mapping[str, Any] | None:
        """The next line that follows from no other one, if it comes next; None at the end."""
        at = self._next
        return self._part.lines[at] if at < len(self._part.lines) else None

    @property
    def ended(self) -> bool:
        """Whether all has happened."""
        return self.head is None

    @property
    def place(self) -> str:
        """Where the replay stands."""
        return f"event {self._part.first + self._next} of the run's event log"

    @property
    def script(self) -> Script:
        """What engines do."""
        return self._part.script

    def reached(self, kind: str) -> bool:
        """Whether the run did this next; before, the rest of what it heard must be heard.

        Raises:
            ReplayError: the run did something else.
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
            ReplayError: it is not; the message says what differs.
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
