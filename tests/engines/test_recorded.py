"""The orders of a run, let through as it gave them, whichever thread is earlier."""

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
    named,
)
from millrace.types import Completion

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
    assert [named(event) for event in events] == [
        "drawn 3.1.7",
        "judged call-2",
        "loaded engine-0 4",
        "loaded engine-1 4",
        "loaded engine-0 5",
        "lost engine-0 it hangs",
        "joined engine-0",
        "wanted 3",
        "wanted 2 there is no room",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_orders_of_two_threads_pass_as_they_passed_in_the_run(seed):
    rng = random.Random(seed)
    letters = "".join(rng.choice("slad") for _ in range(12))
    numbered = list(enumerate(letters))
    threads = [[one for one in numbered if (one[1] == "d") == direct] for direct in (True, False)]
    gate, passed = CommandGate("engine-0", letters), []
    while any(threads):
        thread = rng.choice([thread for thread in threads if thread])
        number, letter = thread.pop(0)
        passed += gate.due(letter, number)
    assert passed == list(range(12))


def test_after_the_last_order_of_the_run_only_draws_pass_whose_caller_waits():
    gate = CommandGate("engine-0", "sda")
    assert gate.due("d", 1) == []
    assert gate.due("d", 2) == []
    assert gate.due("s", 0) == [0, 1]
    assert gate.due("a", 3) == [3, 2]
    # What an engine says tells what it took up: the run heard nothing that came after these.
    assert [gate.due(letter, 4) for letter in "salf"] == [[], [], [], []]
    assert gate.due("d", 5) == [5]


def test_another_order_than_the_run_gave_is_refused():
    gate = CommandGate("engine-7", "dsl")
    assert gate.due("s", 0) == []
    with pytest.raises(ReplayError) as caught:
        gate.due("s", 1)
    assert str(caught.value) == "the replay is not the run: engine-7 is given s and took l"


def took(engine, *orders):
    return {"kind": "took", "engine": engine, "orders": [list(order) for order in orders]}


def asked(engine, *draws):
    return {"kind": "asked", "engine": engine, "draws": list(draws)}


def test_a_script_is_what_each_engine_took_up():
    script = RecordedCommands(
        [took("a", (0, "l"), (0, "sd")), took("b", (3, "l")), {"kind": "send"}, took("a", (9, "s"))]
    )
    assert script.turns("a") == [(0, 1), (0, 2), (9, 1)]
    assert script.turns("b") == [(3, 1)]
    assert script.turns("c") == []
    gate = script.gate("a")
    assert [gate.due(letter, letter) for letter in "lsd"] == [["l"], ["s"], ["d"]]
    assert script.gate("b").due("l", 0) == [0]


def test_what_a_caller_waits_for_is_asked_of_whom_the_run_asked():
    script = RecordedCommands([asked("a", 0, 1, 2), asked("b", 1), asked("b", 3)])
    draws = ["direct-0", "direct-1", "direct-2"]
    # Engine a was lost before it had answered draw 1.
    assert script.open("a", []) and script.open("b", [])
    assert script.ask(draws) == ("a", draws)
    assert script.heard("a", "direct-0") and script.heard("b", "direct-1")
    assert not script.heard("a", "direct-1")
    assert script.open("a", ["direct-1", "direct-2"])
    assert not script.open("a", ["direct-1"])
    assert script.ask(["direct-1"]) == ("b", ["direct-1"])
    with pytest.raises(ReplayError, match="2 draws are asked for .* the run asked b for 1"):
        script.ask(["direct-4", "direct-5"])
    with pytest.raises(ReplayError, match="1 draws are asked for .* the run asked nobody for 0"):
        script.ask(["direct-6"])
