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
    event_name,
)
from millrace.run.folder import RunFolder
from millrace.types import Prompt

# Poll interval while the next recorded event is not due yet.
POLL_S = 0.01


class ReplayBackend:
    """An `EngineBackend` over worker processes that returns events in the batches of the recorded run.

    Early events are buffered. Engines stop and start where the log has their loss and their join.
    """

    def __init__(self, backend: SubprocessBackend, recorded_log: RecordedLog, *, limit_s: float) -> None:
        """Wrap the backend of a replay.

        Args:
            backend: backend of the worker processes.
            recorded_log: the recorded log, at its current position.
            limit_s: timeout of a recorded event, doubled because the trainer may be busy.
        """
        self._backend, self._recorded_log, self._limit_s = backend, recorded_log, limit_s
        # Events that arrived before their turn in the log, by name.
        self._early: dict[str, Event] = {}
        # The arrived events of the next recorded batch; and the engine that is being started for it.
        self._batch: list[Event] = []
        self._starting = ""
        self._progress_s = self.now()

    def begin(self) -> None:
        """Start the engines on their recorded commands."""
        self._backend.begin(self._recorded_log.recorded)

    def now(self) -> float:
        """Return the time in seconds on the clock of the worker processes."""
        return self._backend.now()

    def engines(self) -> list[str]:
        """Return the names of the live engines."""
        return self._backend.engines()

    def submit(self, engine: str, requests: Sequence[GenerateRequest]) -> None:
        """Submit requests; the engine starts them at the recorded step."""
        self._backend.submit(engine, requests)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """Abort requests at the recorded step."""
        self._backend.abort(engine, ids)

    def update_weights(self, version: int) -> None:
        """Copy the trainer's weights."""
        self._backend.update_weights(version)

    def load(self, engine: str, version: int) -> None:
        """Load the trainer's weights at the recorded step."""
        self._backend.load(engine, version)

    def lose(self, engine: str, reason: str) -> None:
        """Raise ReplayError: only the log may stop an engine."""
        raise ReplayError(f"{engine} is lost, and in the run it was not: {reason}")

    def scale(self, number: int) -> None:
        """Do nothing: engines start and stop where the log has their join and their loss."""

    def retire(self, engine: str) -> None:
        """Do nothing, as in `scale`."""

    def score(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts again."""
        self._backend.score(id, prompts, texts)

    def records(self) -> list[Record]:
        """Return no records: the log has them already."""
        self._backend.records()
        return []

    def close(self) -> None:
        """Stop every engine and reward worker."""
        self._backend.close()

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the next recorded batch of events once all have arrived; empty before its turn.

        Raises:
            ReplayError: an event of the batch does not arrive in time.
        """
        head = self._recorded_log.head
        if head is None or head["kind"] != "events_received":
            self._progress_s = self.now()
            self._receive(min(timeout_s, POLL_S))
            return []
        expected = head["events"]
        while len(self._batch) < len(expected):
            event = self._next(expected[len(self._batch)])
            if event is not None:
                self._batch.append(event)
                self._progress_s = self.now()
            elif not self._receive(timeout_s):
                if self.now() > self._progress_s + 2 * self._limit_s:
                    missing = expected[len(self._batch)]
                    raise ReplayError(
                        f"{self._recorded_log.place}: the run received {missing!r} here; the replay did not"
                    )
                return []
        batch, self._batch = self._batch, []
        return batch

    def _next(self, name: str) -> Event | None:
        """Return the event of this name if it has arrived or can be produced, else None."""
        kind, _, rest = name.partition(" ")
        if kind == "engine_lost":
            engine, _, reason = rest.partition(" ")
            if engine in self._backend.engines():
                self._backend.end(engine)
            return EngineLost(engine, reason)
        if kind == "scale":
            number, _, reason = rest.partition(" ")
            return ScaleRequest(int(number), reason)
        event = self._early.pop(name, None)
        if kind == "engine_joined" and event is None and self._starting != rest:
            self._starting = rest
            self._backend.start(rest)
        return event

    def _receive(self, timeout_s: float) -> bool:
        """Buffer new events; return whether there were any."""
        events = self._backend.wait(timeout_s)
        self._early.update((event_name(event), event) for event in events)
        if events:
            self._progress_s = self.now()
        return bool(events)


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedSegment:
    """A segment of a run that another process replays; a `run.run.Repetition`.

    Attributes:
        original: the run's folder.
        segment: the segment.
    """

    original: RunFolder
    segment: RunSegment

    @property
    def threads(self) -> Sequence[int]:
        """Number of threads of each rank; see `RunSegment`."""
        return self.segment.threads

    def over(self, stage: str, step: int) -> bool:
        """Return whether the replayed segment ends here."""
        return self.segment.over(stage, step)

    def logged(
        self, backend: EngineBackend, path: Path, clock: Callable[[], float], *, limit_s: float
    ) -> tuple[EngineBackend, EventLog]:
        """Return a backend and an event log that follow the replayed segment.

        Args:
            backend: backend for generation and scoring.
            path: of the new log.
            clock: seconds, for the new log.
            limit_s: see `ReplayBackend`.
        """
        log = RecordedLog(path, clock, self.segment)
        # Engines in this process are deterministic in the order of calls.
        if isinstance(backend, SubprocessBackend):
            backend = ReplayBackend(backend, log, limit_s=limit_s)
        return backend, log

    def comparison(self, folder: RunFolder) -> Sink:
        """Return a sink that compares each record of the replay with the run's."""
        return Comparison(self.original, folder)
