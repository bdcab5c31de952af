"""The replay backend: worker processes repeat their recorded commands, with events in recorded order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.engines.subprocesses import SubprocessBackend
from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentHost,
    EnvironmentReply,
    StepEnvironment,
)
from millrace.eventlog.log import EventLog
from millrace.observability.sinks import Sink
from millrace.replay.compare import Comparison
from millrace.replay.recorded_log import RecordedBlockingRequests, RecordedLog, ReplayError, RunSegment
from millrace.rollout.backend import (
    BlockingRequest,
    CommandsStarted,
    EngineBackend,
    EngineCommand,
    EngineLost,
    Event,
    RestartTurns,
    Retire,
    Scale,
    ScaleRequest,
    StartEngine,
    StopEngine,
)
from millrace.rollout.recorder import as_record
from millrace.run.folder import RunFolder

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
        self.now, self.engines, self.close = backend.now, backend.engines, backend.close
        self._turns = recorded_log.segment.turns()
        self._blocking = RecordedBlockingRequests(recorded_log.segment.blocking_requests())
        # Events that arrived before their turn in the log.
        self._early: list[Event] = []
        # The arrived events of the next recorded batch; and the engines that were started and stopped.
        self._batch: list[Event] = []
        self._started: set[str] = set()
        self._stopped: set[str] = set()
        self._progress_s = self.now()

    def execute(self, command: EngineCommand) -> None:
        """Execute a command; only the log starts and stops engines."""
        match command:
            case RestartTurns():
                # A lost engine is not replaced.
                self._backend.execute(Scale(0))
                self._backend.execute(RestartTurns(self._turns))
                self._backend.replay_blocking(self._blocking)
            case Scale() | Retire() | StopEngine():
                pass
            case StepEnvironment() | CloseEpisode():
                pass  # the replies are in the log
            case _:
                self._backend.execute(command)

    def wait(self, timeout_s: float) -> None:
        """Wait for events of the worker processes.

        Raises:
            ReplayError: an event of the next recorded batch does not arrive in time.
        """
        expected = self._expected()
        if expected is None:
            self._progress_s = self.now()
            timeout_s = min(timeout_s, POLL_S)
        self._backend.wait(timeout_s)
        if expected is not None and self.now() > self._progress_s + 2 * self._limit_s:
            raise ReplayError(
                f"{self._recorded_log.place}: the run received {expected[len(self._batch)]} here; the replay "
                "did not"
            )

    def poll(self) -> list[Event]:
        """Return the next recorded batch of events once all have arrived; empty before its turn.

        Raises:
            ReplayError: an engine is lost that the run did not lose here.
        """
        self._receive()
        expected = self._expected()
        if expected is None:
            return []
        while len(self._batch) < len(expected):
            event = self._arrived(expected[len(self._batch)])
            if event is None:
                return []
            self._batch.append(event)
            self._progress_s = self.now()
        batch, self._batch = self._batch, []
        return batch

    def _expected(self) -> Sequence[dict[str, Any]] | None:
        """Return the batch of events that is next in the log; None before its turn."""
        head = self._recorded_log.head
        return head["events"] if head is not None and head["kind"] == "events_received" else None

    def _arrived(self, recorded: dict[str, Any]) -> Event | None:
        """Return a recorded event if it has arrived or is produced here, else None."""
        match recorded:
            case {"kind": "engine_lost", "engine": engine, "reason": reason}:
                if engine not in self._stopped:
                    if self._blocking.is_pending(engine):
                        return None
                    self._stopped.add(engine)
                    self._backend.execute(StopEngine(engine, reason))
                return EngineLost(engine, reason)
            case {"kind": "scale_request", "number": number, "reason": reason, "id": id}:
                return ScaleRequest(number, reason, id)
            case {"kind": "environment_reply"}:
                return recorded_reply(recorded)
            case {"kind": "commands_started", "engine": engine, "commands": commands}:
                return CommandsStarted(engine, commands)
            case {"kind": "blocking_request", "engine": engine, "requests": requests}:
                return BlockingRequest(engine, requests)
        for place, event in enumerate(self._early):
            if as_record(event) == recorded:
                return self._early.pop(place)
        engine = recorded.get("engine", "")
        if recorded["kind"] == "engine_joined" and engine not in self._started:
            self._started.add(engine)
            self._backend.execute(StartEngine(engine, self._turns.get(engine, ())))
        return None

    def _receive(self) -> None:
        """Buffer new events."""
        for event in self._backend.poll():
            self._progress_s = self.now()
            match event:
                case EngineLost(engine, reason):
                    if engine not in self._stopped:
                        raise ReplayError(f"{engine} is lost, and in the run it was not lost here: {reason}")
                case CommandsStarted() | BlockingRequest():
                    pass
                case _:
                    self._early.append(event)


def recorded_reply(recorded: Mapping[str, Any]) -> EnvironmentReply:
    """Return the reply of an environment that a run received."""
    return EnvironmentReply.from_json({name: value for name, value in recorded.items() if name != "kind"})


class RecordedReplies:
    """An `EnvironmentHost` that gives the replies of the replayed run, and runs no environment."""

    def __init__(
        self, events: Iterable[Mapping[str, Any]], on_reply: Callable[[EnvironmentReply], object]
    ) -> None:
        """Take the events of the replayed segment."""
        received = [one for event in events if event["kind"] == "events_received" for one in event["events"]]
        self._replies = {one["id"]: one for one in received if one["kind"] == "environment_reply"}
        self._on_reply = on_reply

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Give the recorded reply to a step.

        Raises:
            ReplayError: the run made no such step.
        """
        if isinstance(command, CloseEpisode):
            return
        if command.id not in self._replies:
            raise ReplayError(f"the replay is not the run: its environment has no reply to {command.id}")
        self._on_reply(recorded_reply(self._replies[command.id]))

    def close(self) -> None:
        """Do nothing."""


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

    def replies(self, on_reply: Callable[[EnvironmentReply], object]) -> EnvironmentHost:
        """Make the host of environments; see `RecordedReplies`."""
        return RecordedReplies(self.segment.events, on_reply)

    def logged(
        self, backend: EngineBackend, path: Path, clock: Callable[[], float], *, limit_s: float
    ) -> tuple[EngineBackend, EventLog]:
        """Return a backend and an event log that follow the replayed segment; see `ReplayBackend`."""
        log = RecordedLog(path, clock, self.segment)
        # Engines in this process are deterministic in the order of calls.
        if isinstance(backend, SubprocessBackend):
            backend = ReplayBackend(backend, log, limit_s=limit_s)
        return backend, log

    def comparison(self, folder: RunFolder) -> Sink:
        """Return a sink that compares each record of the replay with the run's."""
        return Comparison(self.original, folder)
