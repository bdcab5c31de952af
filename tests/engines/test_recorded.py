"""The recorded commands of a run pass in the recorded order, whichever thread is earlier."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace.engines.recorded import CommandGate, RecordedCommands, ReplayError
from millrace.rollout.backend import (
    EngineJoined,
    EngineLost,
    GenerateResult,
    ScaleRequest,
    ScoreResult,
    WeightsLoaded,
    event_name,
)
from millrace.types import Completion

NAMES = ("submit", "load", "abort", "blocking_submit")
NOTHING = Completion((), np.empty(0, np.float32), np.empty(0, np.int32), "abort", "")


def test_every_event_has_a_name_of_its_own():
    events = [
        GenerateResult("engine-0", "3.1.7", NOTHING),
        ScoreResult("call-2", ()),
        WeightsLoaded("engine-0", 4),
        WeightsLoaded("engine-1", 4),
        WeightsLoaded("engine-0", 5),
        EngineLost("engine-0", "it hangs"),
        EngineJoined("engine-0"),
        ScaleRequest(3),
        ScaleRequest(2, "there is no room"),
    ]
    assert [event_name(event) for event in events] == [
        "generated 3.1.7",
        "scored call-2",
        "weights_loaded engine-0 4",
        "weights_loaded engine-1 4",
        "weights_loaded engine-0 5",
        "engine_lost engine-0 it hangs",
        "engine_joined engine-0",
        "scale 3",
        "scale 2 there is no room",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_commands_of_two_threads_pass_as_they_passed_in_the_run(seed):
    rng = random.Random(seed)
    commands = [rng.choice(NAMES) for _ in range(12)]
    numbered = list(enumerate(commands))
    threads = [
        [one for one in numbered if (one[1] == "blocking_submit") == blocking] for blocking in (True, False)
    ]
    gate, passed = CommandGate("engine-0", commands), []
    while any(threads):
        thread = rng.choice([thread for thread in threads if thread])
        number, command = thread.pop(0)
        passed += gate.due(command, number)
    assert passed == list(range(12))


def test_after_the_last_command_of_the_run_only_blocking_requests_pass():
    gate = CommandGate("engine-0", ["submit", "blocking_submit", "abort"])
    assert gate.due("blocking_submit", 1) == []
    assert gate.due("blocking_submit", 2) == []
    assert gate.due("submit", 0) == [0, 1]
    assert gate.due("abort", 3) == [3, 2]
    # What an engine says tells what it took up: the run heard nothing that came after these.
    assert [gate.due(name, 4) for name in ("submit", "abort", "load", "other")] == [[], [], [], []]
    assert gate.due("blocking_submit", 5) == [5]


def test_another_command_than_the_run_sent_is_refused():
    gate = CommandGate("engine-7", ["blocking_submit", "submit", "load"])
    assert gate.due("submit", 0) == []
    with pytest.raises(ReplayError) as caught:
        gate.due("submit", 1)
    assert str(caught.value) == "the replay is not the run: engine-7 gets submit and started load"


def started(engine, *commands):
    return {"kind": "commands_started", "engine": engine, "commands": [list(one) for one in commands]}


def blocking_request(engine, *requests):
    return {"kind": "blocking_request", "engine": engine, "requests": list(requests)}


def test_recorded_commands_are_those_each_engine_started():
    recorded = RecordedCommands(
        [
            started("a", (0, ["load"]), (0, ["submit", "blocking_submit"])),
            started("b", (3, ["load"])),
            {"kind": "update_weights"},
            started("a", (9, ["submit"])),
        ]
    )
    assert recorded.turns("a") == [(0, 1), (0, 2), (9, 1)]
    assert recorded.turns("b") == [(3, 1)]
    assert recorded.turns("c") == []
    gate = recorded.gate("a")
    assert [gate.due(name, name) for name in ("load", "submit", "blocking_submit")] == [
        ["load"],
        ["submit"],
        ["blocking_submit"],
    ]
    assert recorded.gate("b").due("load", 0) == [0]


def test_a_blocking_request_goes_to_the_recorded_engine():
    recorded = RecordedCommands(
        [blocking_request("a", 0, 1, 2), blocking_request("b", 1), blocking_request("b", 3)]
    )
    requests = ["blocking-0", "blocking-1", "blocking-2"]
    # Engine a was lost before it had answered draw 1.
    assert recorded.is_pending("a", []) and recorded.is_pending("b", [])
    assert recorded.next_blocking(requests) == ("a", requests)
    assert recorded.was_received("a", "blocking-0") and recorded.was_received("b", "blocking-1")
    assert not recorded.was_received("a", "blocking-1")
    assert recorded.is_pending("a", ["blocking-1", "blocking-2"])
    assert not recorded.is_pending("a", ["blocking-1"])
    assert recorded.next_blocking(["blocking-1"]) == ("b", ["blocking-1"])
    with pytest.raises(ReplayError, match="2 blocking requests .* the run submitted 1 to b"):
        recorded.next_blocking(["blocking-4", "blocking-5"])
    with pytest.raises(ReplayError, match="1 blocking requests .* the run submitted 0 to no engine"):
        recorded.next_blocking(["blocking-6"])
