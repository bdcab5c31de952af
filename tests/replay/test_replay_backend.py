"""What happens comes as the run heard it: together, in that order, and not before its turn."""

from __future__ import annotations

import pytest

from millrace.engines.recorded import RecordedCommands, ReplayError
from millrace.replay.replay_backend import ReplayBackend
from millrace.rollout.backend import EngineJoined, EngineLost, Event, ScaleRequest, ScoreResult, WeightsLoaded


class Engines:
    """Stands in for processes: `wait` gives what is in `events`; its clock stands still."""

    def __init__(self, *alive: str) -> None:
        self.alive, self.now_s = list(alive), 0.0
        self.events: list[Event] = []
        self.told: list[tuple[str, ...]] = []

    def now(self) -> float:
        return self.now_s

    def engines(self) -> list[str]:
        return self.alive

    def begin(self, recorded: RecordedCommands) -> None:
        self.recorded = recorded

    def end(self, engine: str) -> None:
        self.told.append(("end", engine))
        self.alive.remove(engine)

    def start(self, engine: str) -> None:
        self.told.append(("start", engine))

    def records(self) -> list[tuple[str, dict[str, int]]]:
        return [("commands_started", {"engine": 0})]

    def wait(self, timeout_s: float) -> list[Event]:
        found, self.events = self.events, []
        return found


class RecordedEvents:
    """What is in `events`, each passed by whoever pops it."""

    place = "line 12 of the run's event log"

    def __init__(self, *lines: list[str] | str) -> None:
        self.events = list(lines)
        self.recorded = RecordedCommands([])

    @property
    def head(self):
        if not self.events:
            return None
        line = self.events[0]
        return {"kind": line} if isinstance(line, str) else {"kind": "events_received", "events": line}


def test_what_comes_early_is_kept_until_its_turn():
    engines, recorded = Engines(), RecordedEvents(["scored b", "weights_loaded e 3"], "take", ["scored a"])
    backend = ReplayBackend(engines, recorded, limit_s=10.0)
    backend.begin()
    assert engines.recorded is recorded.recorded
    engines.events = [ScoreResult("a", ()), ScoreResult("b", ())]
    assert backend.wait(0.1) == []
    engines.events = [WeightsLoaded("e", 3, 8)]
    assert backend.wait(0.1) == [ScoreResult("b", ()), WeightsLoaded("e", 3, 8)]
    recorded.events.pop(0)
    # It has happened, but the trainer took a batch before it was heard.
    assert backend.wait(0.1) == []
    recorded.events.pop(0)
    assert backend.wait(0.1) == [ScoreResult("a", ())]
    recorded.events.pop(0)
    assert backend.wait(0.1) == []
    # The records are the run's.
    assert backend.records() == []


def test_engines_end_and_start_where_the_log_says_so():
    engines = Engines("e", "f")
    recorded = RecordedEvents(
        ["scored a", "engine_lost e it hangs, for long", "engine_joined g"],
        ["engine_lost e it hangs, for long"],
    )
    backend = ReplayBackend(engines, recorded, limit_s=10.0)
    assert backend.wait(0.1) == []
    # It must have said first what was heard of it first.
    assert engines.told == []
    engines.events = [ScoreResult("a", ())]
    assert backend.wait(0.1) == []
    assert backend.wait(0.1) == []
    assert engines.told == [("end", "e"), ("start", "g")]
    engines.events = [EngineJoined("g")]
    lost = EngineLost("e", "it hangs, for long")
    assert backend.wait(0.1) == [ScoreResult("a", ()), lost, EngineJoined("g")]
    recorded.events.pop(0)
    # Given up and then found dead: heard twice.
    assert backend.wait(0.1) == [lost]
    assert engines.told == [("end", "e"), ("start", "g")]


def test_what_never_happens_is_named():
    engines = Engines()
    backend = ReplayBackend(engines, RecordedEvents("take", ["generated 3.1.7"]), limit_s=10.0)
    engines.now_s = 1000.0
    # While the trainer works, nothing is missing.
    assert backend.wait(0.1) == []
    backend._recorded_log.events.pop(0)
    engines.now_s = 1019.0
    assert backend.wait(0.1) == []
    engines.now_s = 1021.0
    with pytest.raises(ReplayError) as caught:
        backend.wait(0.1)
    assert str(caught.value) == (
        "line 12 of the run's event log: the run received 'generated 3.1.7' here; the replay did not"
    )
    with pytest.raises(ReplayError, match="engine-0 is lost, and in the run it was not: it is late"):
        backend.lose("engine-0", "it is late")


def test_what_was_asked_is_heard_when_the_run_heard_it_and_only_the_log_starts_and_ends_engines():
    engines = Engines("e", "f")
    backend = ReplayBackend(
        engines,
        RecordedEvents("take", ["scale 3", "scale 2 there is no room"], ["engine_lost f it left"]),
        limit_s=9,
    )
    assert backend.wait(0.1) == []
    backend._recorded_log.events.pop(0)
    assert backend.wait(0.1) == [ScaleRequest(3), ScaleRequest(2, "there is no room")]
    backend.scale(3)
    backend.retire("f")
    assert engines.told == []
    backend._recorded_log.events.pop(0)
    assert backend.wait(0.1) == [EngineLost("f", "it left")]
    assert engines.told == [("end", "f")]
