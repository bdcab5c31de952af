"""Events come as the run received them: together, in that order, and not before their turn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from millrace.engines.subprocesses import BlockingRequests
from millrace.environments.running_episodes import EnvironmentReply
from millrace.replay.recorded_log import ReplayError, RunSegment
from millrace.replay.replay_backend import ReplayBackend
from millrace.rollout.backend import (
    BlockingRequest,
    CommandsStarted,
    EngineCommand,
    EngineJoined,
    EngineLost,
    Event,
    LoadWeights,
    RestartTurns,
    Retire,
    Scale,
    ScaleRequest,
    Score,
    ScoreResult,
    StartEngine,
    StopEngine,
    WeightsLoaded,
)
from millrace.rollout.recorder import as_record, outcome_record
from millrace.types import Outcome
from tests.environments.steps import PROMPT, step


class Engines:
    """Processes whose `poll` gives what is in `events`; the clock does not move."""

    def __init__(self, *alive: str) -> None:
        self.alive, self.now_s = list(alive), 0.0
        self.events: list[Event] = []
        self.commands: list[EngineCommand] = []
        self.close, self.blocking = lambda: None, BlockingRequests()

    def now(self) -> float:
        return self.now_s

    def engines(self) -> list[str]:
        return self.alive

    def execute(self, command: EngineCommand) -> None:
        self.commands.append(command)
        if isinstance(command, StopEngine):
            self.alive.remove(command.engine)
            self.events.append(EngineLost(command.engine, "it was killed"))

    def replay_blocking(self, requests: BlockingRequests) -> None:
        self.blocking = requests

    def wait(self, timeout_s: float) -> None:
        pass

    def poll(self) -> list[Event]:
        found, self.events = self.events, []
        return found


class RecordedEvents(SimpleNamespace):
    """A log of batches of events and of the trainer's actions; `next` passes to the next one."""

    place = "line 12 of the run's event log"

    def __init__(self, *lines: list[Event] | str, **given) -> None:
        self.events = [
            {"kind": one}
            if isinstance(one, str)
            else {"kind": "events_received", "events": [as_record(event) for event in one]}
            for one in lines
        ]
        super().__init__(segment=RunSegment([*self.events], 1, 0), **given)

    @property
    def head(self):
        return self.events[0] if self.events else None

    def next(self):
        self.events.pop(0)


def waited(backend):
    backend.wait(0.1)
    return backend.poll()


def test_what_comes_early_is_kept_until_its_turn():
    engines = Engines()
    recorded = RecordedEvents(
        [ScoreResult("b", ()), WeightsLoaded("e", 3)], "take", [ScoreResult("a", ())], "save"
    )
    backend = ReplayBackend(engines, recorded, limit_s=10.0)
    engines.events = [ScoreResult("a", ()), ScoreResult("b", ())]
    assert waited(backend) == []
    engines.events = [WeightsLoaded("e", 3, 8)]
    assert waited(backend) == [ScoreResult("b", ()), WeightsLoaded("e", 3, 8)]
    recorded.next()
    # It has arrived, but the trainer took a batch before it was received.
    assert waited(backend) == []
    recorded.next()
    assert waited(backend) == [ScoreResult("a", ())]
    recorded.next()
    assert waited(backend) == []


def test_engines_end_and_start_where_the_log_says_so():
    engines, lost = Engines("e", "f"), EngineLost("e", "it hangs, for long")
    recorded = RecordedEvents([ScoreResult("a", ()), lost, EngineJoined("g")], [lost], [EngineLost("g", "")])
    backend = ReplayBackend(engines, recorded, limit_s=10.0)
    assert waited(backend) == []
    # It must have reported first what the run received first.
    assert engines.commands == []
    engines.events = [ScoreResult("a", ())]
    assert waited(backend) == []
    assert waited(backend) == []
    stop, start = StopEngine("e", "it hangs, for long"), StartEngine("g", ())
    assert engines.commands == [stop, start]
    engines.events += [EngineJoined("g")]
    engines.alive.append("g")
    assert waited(backend) == [ScoreResult("a", ()), lost, EngineJoined("g")]
    recorded.next()
    # Stopped and then found dead: received twice.
    assert waited(backend) == [lost]
    recorded.next()
    assert waited(backend) == [EngineLost("g", "")]
    assert engines.commands == [stop, start, StopEngine("g", "")]


def test_what_never_happens_is_named():
    engines, recorded = Engines(), RecordedEvents("take", [ScoreResult("call-7", ())])
    backend = ReplayBackend(engines, recorded, limit_s=10.0)
    engines.now_s = 1000.0
    # While the trainer works, nothing is missing.
    assert waited(backend) == []
    recorded.next()
    engines.now_s = 1019.0
    assert waited(backend) == []
    engines.now_s = 1021.0
    with pytest.raises(ReplayError) as caught:
        backend.wait(0.1)
    assert str(caught.value) == (
        "line 12 of the run's event log: the run received {'kind': 'score_result', 'id': 'call-7'} here; the "
        "replay did not"
    )
    engines.events = [EngineLost("engine-0", "it is late")]
    with pytest.raises(ReplayError, match="engine-0 is lost, and in the run .* not lost here: it is late"):
        backend.poll()


def test_only_the_log_starts_and_stops_engines_and_reports_what_they_started():
    engines = Engines("e", "f")
    started, blocking = CommandsStarted("e", [(0, ["update_weights"])]), BlockingRequest("e", [0])
    requests = [ScaleRequest(3), ScaleRequest(2, "there is no room")]
    recorded = RecordedEvents("take", [started, *requests, blocking], [EngineLost("f", "it left")])
    backend = ReplayBackend(engines, recorded, limit_s=9)
    backend.execute(RestartTurns())
    # A lost engine is not replaced, and each repeats its turns.
    assert engines.commands == [Scale(0), RestartTurns({"e": [(0, ["update_weights"])]})]
    assert engines.blocking.is_pending("e")
    assert waited(backend) == []
    recorded.next()
    # What engines report here has the log already.
    engines.events = [CommandsStarted("e", [(9, ["update_weights"])])]
    assert waited(backend) == [started, *requests, blocking]
    for command in (Scale(3), Retire("f"), StopEngine("f", "it is late"), LoadWeights("e", 3)):
        backend.execute(command)
    assert engines.commands[2:] == [LoadWeights("e", 3)]
    recorded.next()
    assert waited(backend) == [EngineLost("f", "it left")]
    assert engines.commands[3:] == [StopEngine("f", "it left")]


def test_recorded_scores_are_given_and_the_reward_is_not_called():
    engines, outcome = Engines("e"), Outcome("score", 0.5)
    recorded = RecordedEvents([ScoreResult("call-0", ())])
    recorded.events[0]["events"][0]["outcomes"] = [outcome_record(outcome)]
    backend = ReplayBackend(engines, recorded, limit_s=10.0)
    backend.execute(Score("call-0", [PROMPT], ["2"]))
    assert engines.commands == [] and waited(backend) == [ScoreResult("call-0", (outcome,))]


def test_a_recorded_reply_waits_for_that_of_its_live_environment():
    engines, replies = Engines("e"), []
    reply = EnvironmentReply("0.0.0.0", (7, 8))

    class Host:
        def __init__(self, on_reply):
            replies.append(on_reply)

        def execute(self, command):
            replies.append(command)

        def close(self):
            replies.append("closed")

    recorded = RecordedEvents([reply])
    assert waited(ReplayBackend(engines, recorded, limit_s=10.0)) == [reply]
    backend = ReplayBackend(engines, recorded, limit_s=10.0, make_environments=Host)
    backend.execute(step())
    assert waited(backend) == [] and replies[1] == step()
    replies[0](reply)
    assert waited(backend) == [reply]
    backend.close()
    assert replies[-1] == "closed"
