"""The replay backend: worker processes repeat their recorded commands, with events in recorded order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.engines.subprocesses import SubprocessBackend
from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentHost,
    EnvironmentReply,
    StepEnvironment,
)
from millrace.environments.synchronous import MakeHost
from millrace.eventlog.log import EventLog
from millrace.observability.sinks import Sink
from millrace.replay.compare import Comparison
from millrace.replay.live_replies import (
    Decode,
    LiveComparison,
    LiveReplies,
    RecordedReply,
    recorded_reply,
    replies_of_log,
)
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
    Score,
    ScoreResult,
    StartEngine,
    StopEngine,
)
from millrace.rollout.recorder import as_record, recorded_outcome
from millrace.run.folder import RunFolder
from millrace.run.recorded_evaluation import read_recorded
from millrace.types import Outcome

# Poll interval while the next recorded event is not due yet.
POLL_S = 0.01


class ReplayBackend:
    """An `EngineBackend` over worker processes that returns events in the batches of the recorded run.

    Early events are buffered. Engines stop and start where the log has their loss and their join.
    """

    def __init__(
        self,
        backend: SubprocessBackend,
        recorded_log: RecordedLog,
        *,
        limit_s: float,
        make_environments: MakeHost | None = None,
    ) -> None:
        """Wrap the backend of a replay.

        Args:
            backend: backend of the worker processes.
            recorded_log: the recorded log, at its current position.
            limit_s: timeout of a recorded event, doubled because the trainer may be busy.
            make_environments: makes what runs environments beside the replay, and gives the recorded replies
                once they may be received; None takes them from the log.
        """
        self._backend, self._recorded_log, self._limit_s = backend, recorded_log, limit_s
        self.now, self.engines = backend.now, backend.engines
        self._make_environments = make_environments
        self._environments: EnvironmentHost | None = None
        # Ids of the steps of live environments whose replies may be received; another thread adds to it.
        self._replied: set[str] = set()
        self._has_scores = bool(scores_of(recorded_log.segment.events))
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
            case Score() if self._has_scores:
                pass  # the outcomes are in the log
            case StepEnvironment() | CloseEpisode():
                self._run_live(command)  # the replies are in the log
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
        if expected is None or self._make_environments is not None:
            # Nothing ends the wait when a live environment replies.
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
            case {"kind": "environment_reply", "id": id}:
                if self._make_environments is not None:
                    if id not in self._replied:
                        return None
                    self._replied.discard(id)
                return recorded_reply(recorded)
            case {"kind": "score_result", "id": id, "outcomes": outcomes}:
                return ScoreResult(id, tuple(map(recorded_outcome, outcomes)))
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

    def close(self) -> None:
        """Close the backend, and the live environments."""
        self._backend.close()
        if self._environments is not None:
            self._environments.close()

    def _run_live(self, command: StepEnvironment | CloseEpisode) -> None:
        """Run a step of a live environment; without them, do nothing."""
        if self._make_environments is None:
            return
        if self._environments is None:
            self._environments = self._make_environments(lambda reply: self._replied.add(reply.id))
        self._environments.execute(command)

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


def scores_of(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Outcome]]:
    """Return the recorded outcomes of each call of the reward; those that are computed again have none."""
    received = (one for event in events if event["kind"] == "events_received" for one in event["events"])
    return {
        one["id"]: [recorded_outcome(outcome) for outcome in one["outcomes"]]
        for one in received
        if one["kind"] == "score_result" and "outcomes" in one
    }


class RecordedReplies:
    """An `EnvironmentHost` that gives the replies of the replayed run, and runs no environment."""

    def __init__(
        self, recorded: Mapping[str, RecordedReply], on_reply: Callable[[EnvironmentReply], object]
    ) -> None:
        """Take the recorded replies by the ids of their steps."""
        self._recorded, self._on_reply = recorded, on_reply

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Give the recorded reply to a step.

        Raises:
            ReplayError: the run made no such step.
        """
        if isinstance(command, CloseEpisode):
            return
        if command.id not in self._recorded:
            raise ReplayError(f"the replay is not the run: its environment has no reply to {command.id}")
        self._on_reply(self._recorded[command.id].reply)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedSegment:
    """A segment of a run that another process replays; a `run.run.Repetition`.

    Attributes:
        original: the run's folder.
        segment: the segment.
        live: compares live environments with the recorded replies; None runs none.
    """

    original: RunFolder
    segment: RunSegment
    live: LiveComparison | None = None

    @property
    def threads(self) -> Sequence[int]:
        """Number of threads of each rank; see `RunSegment`."""
        return self.segment.threads

    def over(self, stage: str, step: int) -> bool:
        """Return whether the replayed segment ends here."""
        return self.segment.over(stage, step)

    def scores(self) -> Mapping[str, Sequence[Outcome]]:
        """Return the recorded outcomes of each call of the reward; see `scores_of`."""
        return scores_of(self.segment.events)

    def evaluation_scores(self, name: str) -> Sequence[Outcome] | None:
        """Return the recorded outcomes of an evaluation; None if they are computed again."""
        found = read_recorded(self.original, name)
        if found is None or found.outcomes is None:
            return None
        return [recorded_outcome(one) for one in found.outcomes]

    def notices(self) -> list[str]:
        """Return what live environments did and the user is to see at once."""
        return [] if self.live is None else self.live.notices()

    def replies(self, make_live: MakeHost, decode: Decode) -> MakeHost:
        """Return what makes the host of environments; see `RecordedReplies` and `LiveReplies`."""
        return self._hosts(replies_of_log(self.segment.events), make_live, decode)

    def evaluation_replies(self, name: str, make_live: MakeHost, decode: Decode) -> MakeHost | None:
        """Return the same for an evaluation; None if its replies are not recorded."""
        found = read_recorded(self.original, name)
        if found is None:
            return None
        replies = [EnvironmentReply.from_json(fields) for fields in found.replies]
        place = f"the evaluation at {name}"
        recorded = {one.id: RecordedReply(one, place, order) for order, one in enumerate(replies)}
        return self._hosts(recorded, make_live, decode)

    def _hosts(self, recorded: Mapping[str, RecordedReply], make_live: MakeHost, decode: Decode) -> MakeHost:
        if self.live is None:
            return partial(RecordedReplies, recorded)
        live = self.live

        def make(on_reply: Callable[[EnvironmentReply], object]) -> EnvironmentHost:
            return LiveReplies(recorded, make_live, on_reply, live, decode)

        return make

    def logged(
        self,
        backend: EngineBackend,
        path: Path,
        clock: Callable[[], float],
        *,
        limit_s: float,
        make_environments: MakeHost | None,
    ) -> tuple[EngineBackend, EventLog]:
        """Return a backend and an event log that follow the replayed segment; see `ReplayBackend`."""
        log = RecordedLog(path, clock, self.segment)
        # Engines in this process are deterministic in the order of calls.
        if isinstance(backend, SubprocessBackend):
            live = None if self.live is None else make_environments
            backend = ReplayBackend(backend, log, limit_s=limit_s, make_environments=live)
        return backend, log

    def comparison(self, folder: RunFolder) -> Sink:
        """Return a sink that compares each record of the replay with the run's."""
        return Comparison(self.original, folder)
