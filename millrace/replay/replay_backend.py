"""The replay backend: worker processes repeat their recorded commands, with events in recorded order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.engines.recorded import ReplayError
from millrace.engines.subprocesses import SubprocessBackend
from millrace.eventlog.log import EventLog
from millrace.observability.sinks import Sink
from millrace.replay.compare import Comparison
from millrace.replay.recorded_log import RecordedLog, RunSegment
from millrace.rollout.backend import (
    EngineBackend,
    EngineLost,
    Event,
    GenerateRequest,
    Record,
    ScaleRequest,
    named,
)
from millrace.run.folder import RunFolder
from millrace.types import Prompt

# Poll interval while the next recorded event is not due yet.
LOOK_S = 0.01


class ReplayBackend:
    """An `EngineBackend` over worker processes that returns events in the batches of the recorded run.

    Early events are buffered. Engines stop and start where the log has their loss and their join.
    """

    def __init__(self, runtime: SubprocessBackend, score: RecordedLog, *, limit_s: float) -> None:
        """Wrap the backend of a replay.

        Args:
            runtime: backend of the worker processes.
            score: the recorded log, at its current position.
            limit_s: timeout of a recorded event, doubled because the trainer may be busy.
        """
        self._runtime, self._score, self._limit_s = runtime, score, limit_s
        # Events that arrived before their turn in the log, by name.
        self._early: dict[str, Event] = {}
        # The arrived events of the next recorded batch; and the engine that is being started for it.
        self._batch: list[Event] = []
        self._starts = ""
        self._moved_s = self.now()

    def begin(self) -> None:
        """Start the engines on their recorded commands."""
        self._runtime.begin(self._score.script)

    def now(self) -> float:
        """Return the time in seconds on the clock of the worker processes."""
        return self._runtime.now()

    def engines(self) -> list[str]:
        """Return the names of the live engines."""
        return self._runtime.engines()

    def submit(self, engine: str, draws: Sequence[GenerateRequest]) -> None:
        """Submit requests; the engine starts them at the recorded step."""
        self._runtime.submit(engine, draws)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """Abort requests at the recorded step."""
        self._runtime.abort(engine, ids)

    def offer(self, version: int) -> None:
        """Copy the trainer's weights."""
        self._runtime.offer(version)

    def load(self, engine: str, version: int) -> None:
        """Load the trainer's weights at the recorded step."""
        self._runtime.load(engine, version)

    def lose(self, engine: str, reason: str) -> None:
        """Raise ReplayError: only the log may stop an engine."""
        raise ReplayError(f"{engine} is given up, and in the run it was not: {reason}")

    def want(self, number: int) -> None:
        """Do nothing: engines start and stop where the log has their join and their loss."""

    def retire(self, engine: str) -> None:
        """Do nothing, as in `want`."""

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts again."""
        self._runtime.judge(id, prompts, texts)

    def records(self) -> list[Record]:
        """Return no records: the log has them already."""
        self._runtime.records()
        return []

    def close(self) -> None:
        """Stop every engine and reward worker."""
        self._runtime.close()

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the next recorded batch of events once all have arrived; empty before its turn.

        Raises:
            ReplayError: an event of the batch does not arrive in time.
        """
        head = self._score.head
        if head is None or head["kind"] != "heard":
            self._moved_s = self.now()
            self._listen(min(timeout_s, LOOK_S))
            return []
        wanted = head["events"]
        while len(self._batch) < len(wanted):
            event = self._next(wanted[len(self._batch)])
            if event is not None:
                self._batch.append(event)
                self._moved_s = self.now()
            elif not self._listen(timeout_s):
                if self.now() > self._moved_s + 2 * self._limit_s:
                    missing = wanted[len(self._batch)]
                    raise ReplayError(
                        f"{self._score.place}: the run heard {missing!r} here; the replay waits in vain"
                    )
                return []
        batch, self._batch = self._batch, []
        return batch

    def _next(self, name: str) -> Event | None:
        """Return the event of this name if it has arrived or can be produced, else None."""
        kind, _, rest = name.partition(" ")
        if kind == "lost":
            engine, _, reason = rest.partition(" ")
            if engine in self._runtime.engines():
                self._runtime.end(engine)
            return EngineLost(engine, reason)
        if kind == "wanted":
            number, _, reason = rest.partition(" ")
            return ScaleRequest(int(number), reason)
        event = self._early.pop(name, None)
        if kind == "joined" and event is None and self._starts != rest:
            self._starts = rest
            self._runtime.start(rest)
        return event

    def _listen(self, timeout_s: float) -> bool:
        """Buffer new events; return whether there were any."""
        events = self._runtime.wait(timeout_s)
        self._early.update((named(event), event) for event in events)
        if events:
            self._moved_s = self.now()
        return bool(events)


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedSegment:
    """A segment of a run that another process replays; a `run.run.Repetition`.

    Attributes:
        original: the run's folder.
        part: the segment.
    """

    original: RunFolder
    part: RunSegment

    @property
    def threads(self) -> Sequence[int]:
        """Number of threads of each rank; see `RunSegment`."""
        return self.part.threads

    def over(self, stage: str, step: int) -> bool:
        """Return whether the replayed segment ends here."""
        return self.part.over(stage, step)

    def logged(
        self, runtime: EngineBackend, path: Path, clock: Callable[[], float], *, limit_s: float
    ) -> tuple[EngineBackend, EventLog]:
        """Return a backend and an event log that follow the replayed segment.

        Args:
            runtime: backend for generation and scoring.
            path: of the new log.
            clock: seconds, for the new log.
            limit_s: see `ReplayBackend`.
        """
        log = RecordedLog(path, clock, self.part)
        # Engines in this process are deterministic in the order of calls.
        if isinstance(runtime, SubprocessBackend):
            runtime = ReplayBackend(runtime, log, limit_s=limit_s)
        return runtime, log

    def comparison(self, folder: RunFolder) -> Sink:
        """Return a sink that compares each record of the replay with the run's."""
        return Comparison(self.original, folder)
