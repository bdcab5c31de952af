"""The event log: what is written, and that no corruption of it is believed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.eventlog.file import read_log
from millrace.eventlog.log import EventLog, check_log, read_events, resumed_state
from millrace.eventlog.verify import LogError

Events = list[dict[str, Any]]
RULES = {
    "groups_per_step": 2,
    "staleness": 1,
    "order": "submission",
    "stale": "wait",
    "dynamic_sampling_rounds": 1,
    "oversample_groups": 0,
}


def event(kind: str, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, **facts}


def finished(number: int, engine: str, *oldest_steps: int, zero_std: bool = False) -> Events:
    """A group's samples arrive and are scored."""
    arrivals = [
        event("completed", number=number, sample=i, turn=0, engine=engine, oldest_step=step, newest_step=step)
        for i, step in enumerate(oldest_steps)
    ]
    return [*arrivals, event("finish", number=number, oldest_steps=list(oldest_steps), zero_std=zero_std)]


def taken(
    batch: int, numbers: list[int], staleness: list[int], left_out: tuple[int, ...] = ()
) -> dict[str, Any]:
    return event(
        "take", batch=batch, numbers=numbers, staleness=staleness, left_out=list(left_out), withheld={}
    )


def received(*events: dict[str, Any]) -> dict[str, Any]:
    return event("events_received", events=list(events))


def started(*commands: list[Any]) -> dict[str, Any]:
    return {"kind": "commands_started", "engine": "a", "commands": list(commands)}


def sound() -> Events:
    """Two batches of two groups; one is equal, one is dropped, an engine dies, another joins, one resume."""
    return [
        event("begin", rules=dict(RULES), num_batches=2),
        event("weights_loaded", engine="a", step=0),
        event("weights_loaded", engine="b", step=0),
        *(event("start", number=n, prompt=f"p{n}", step=0) for n in range(4)),
        *finished(0, "a", 0, 0),
        *finished(1, "b", 0, 0, zero_std=True),
        event("drop", number=2, reason="stale"),
        event("start", number=4, prompt="p2", step=0),
        event("engine_lost", engine="b", reason="died"),
        *finished(3, "a", 0, 0),
        event("engine_joined", engine="c"),
        event("weights_loaded", engine="c", step=0),
        taken(0, [0, 1, 3], [0, 0, 0], (1,)),
        event("weights_loaded", engine="c", step=1),
        event("weights_loaded", engine="a", step=1),
        event("weights_updated", step=1),
        event("save", name="step-000001"),
        event("update_weights", policy_version=7),
        received(started([0, ["update_weights"]], [0, ["submit"]], [4, ["submit", "blocking_submit"]])),
        event("start", number=5, prompt="p5", step=1),
        finished(5, "a", 1, 1)[0],
        event("abort_in_flight"),
        event("save", name="step-000001"),
        event("resume", numbers=[4, 5], taken=1, num_batches=2),
        event("restored", number=4, turns=[0, 0], tokens=[3, 0]),
        event("restored", number=5, turns=[1, 0], tokens=[0, 2]),
        event("command", command="submit", engine="a", ids=["4.0.9"]),
        received(started([0, ["update_weights"]])),
        received(started([2, ["submit"]]), {"kind": "weights_loaded", "engine": "a", "version": 7}),
        received({"kind": "blocking_request", "engine": "a", "requests": [0, 1]}),
        event("weights_loaded", engine="a", step=1),
        *finished(5, "a", 1, 1)[1:],
        event("ignored", reason="came twice"),
        *finished(4, "a", 1, 1),
        taken(1, [4, 5], [0, 0]),
        event("weights_loaded", engine="a", step=2),
        event("weights_updated", step=2),
    ]


def find(events: Events, kind: str, **facts: Any) -> int:
    """Where the first such event stands."""
    return next(i for i, e in enumerate(events) if e["kind"] == kind and facts.items() <= e.items())


def changed(kind: str, which: dict[str, Any], **facts: Any) -> Callable[[Events], None]:
    def corrupt(events: Events) -> None:
        events[find(events, kind, **which)].update(facts)

    return corrupt


def removed(kind: str, **which: Any) -> Callable[[Events], None]:
    def corrupt(events: Events) -> None:
        del events[find(events, kind, **which)]

    return corrupt


def doubled(kind: str, **which: Any) -> Callable[[Events], None]:
    def corrupt(events: Events) -> None:
        place = find(events, kind, **which)
        events.insert(place, copy.deepcopy(events[place]))

    return corrupt


def before(kind: str, which: dict[str, Any], added: dict[str, Any]) -> Callable[[Events], None]:
    def corrupt(events: Events) -> None:
        events.insert(find(events, kind, **which), added)

    return corrupt


CORRUPTIONS = [
    (removed("begin"), "one event begin, the first"),
    (doubled("begin"), "one event begin, the first"),
    (removed("start", number=3), "group 4 starts where 3 is next"),
    (doubled("start", number=3), "group 3 starts where 4 is next"),
    (changed("start", {"number": 5}, step=0), "the weights are of step 1"),
    (changed("start", {"number": 4}, prompt="p9"), "prompt p2 had to start again first"),
    (removed("weights_loaded", engine="b"), "engine b has not loaded any weights"),
    (changed("completed", {"number": 3}, engine="b"), "engine b has not loaded any weights"),
    (
        changed("completed", {"number": 3}, newest_step=1),
        "engine a has the weights of step 0, but the tokens are of steps 0 to 1",
    ),
    (changed("completed", {"number": 5}, oldest_step=0), "group 5 started at step 1"),
    (removed("completed", number=3), r"but its completed samples are \{1: 0\}"),
    (
        changed("completed", {"number": 3, "sample": 1}, sample=2),
        r"but its completed samples are \{0: 0, 2: 0\}",
    ),
    (changed("completed", {"number": 5}, oldest_step=2), "the tokens are of steps 2 to 1"),
    (doubled("completed", number=3), "sample 0, turn 0 of group 3 was completed before"),
    (before("take", {}, finished(3, "a", 0, 0)[0]), "group 3 is finished already"),
    (before("weights_updated", {}, finished(3, "a", 0, 0)[0]), "group 3 was trained on in batch 0"),
    (before("engine_lost", {}, finished(2, "a", 0, 0)[0]), "group 2 was dropped"),
    (before("engine_lost", {}, finished(9, "a", 0, 0)[0]), "group 9 was never started"),
    (doubled("finish", number=3), "group 3 is finished already"),
    (
        changed("finish", {"number": 5}, oldest_steps=[0, 1]),
        "group 5 has tokens of steps .*started at step 1",
    ),
    (
        changed("finish", {"number": 5}, oldest_steps=[2, 1]),
        "group 5 has tokens of steps .*1 batches were taken",
    ),
    (changed("finish", {"number": 5}, oldest_steps=[]), "group 5 has tokens of steps"),
    (before("finish", {"number": 4}, event("drop", number=5, reason="slow")), "5 was dropped"),
    (changed("drop", {}, reason=""), "group 2 is dropped without a reason"),
    (doubled("drop"), "group 2 was dropped"),
    (changed("drop", {}, number=7), "group 7 was never started"),
    (doubled("take", batch=0), "1 of 2 batches were taken"),
    (changed("take", {"batch": 1}, batch=2), "1 of 2 batches were taken"),
    (changed("begin", {}, num_batches=0), "0 of 0 batches were taken"),
    (changed("take", {"batch": 0}, numbers=[1, 0, 3]), "not in order"),
    (changed("take", {"batch": 1}, numbers=[4, 4]), "not in order"),
    (changed("take", {"batch": 0}, numbers=[0, 1, 4]), "group 4 is not finished"),
    (changed("take", {"batch": 1}, numbers=[3, 4]), "group 3 was trained on in batch 0"),
    (removed("finish", number=3), "group 3 is not finished"),
    (changed("take", {"batch": 0}, left_out=[3]), r"left_out \[3\] has no place"),
    (changed("take", {"batch": 0}, left_out=[]), "with at most 0 replaced has 3 groups"),
    (
        changed("begin", {}, rules={**RULES, "dynamic_sampling_rounds": 0}),
        "with at most 0 replaced has 3 groups",
    ),
    (changed("take", {"batch": 1}, numbers=[4], staleness=[0]), "a batch of 2 .* has 1 groups"),
    (changed("take", {"batch": 0}, numbers=[0, 3], staleness=[0, 0]), r"groups \[1\] started before \[3\]"),
    (changed("take", {"batch": 1}, staleness=[0]), "each group has one staleness"),
    (changed("take", {"batch": 1}, staleness=[1, 0]), "group 4 has tokens of steps .* logged staleness is 1"),
    (changed("take", {"batch": 1}, withheld={"4": [0]}), "the rules let nothing be withheld"),
    (doubled("weights_updated", step=1), "the weights are of step 1"),
    (changed("weights_updated", {"step": 1}, step=2), "the weights are of step 0"),
    (before("take", {"batch": 1}, event("weights_updated", step=2)), "only 1 batches were taken"),
    (removed("weights_loaded", engine="c", step=1), "not every engine has loaded it: c has 0"),
    (changed("weights_loaded", {"step": 2}, step=3), "it can load steps 1 to 2, not 3"),
    (before("save", {}, event("weights_loaded", engine="a", step=0)), "it can load steps 1 to 1, not 0"),
    (
        before("weights_updated", {}, event("weights_loaded", engine="a", step=0)),
        "it can load steps 1 to 1, not 0",
    ),
    (changed("engine_joined", {}, engine="a"), "engine a was there before"),
    (before("save", {}, event("scale", engines=0, draining=[], reason="")), "serve where the target is 0"),
    (
        before("save", {}, event("scale", engines=1, draining=["z"], reason="")),
        r"\['z'\] are draining, and",
    ),
    (
        changed("restored", {"number": 4}, turns=[1, 0]),
        r"of group 4, \(sample, turn\) \[\(0, 0\)\] was not completed",
    ),
    (
        changed("restored", {"number": 5}, turns=[2, 0]),
        r"of group 5, \(sample, turn\) \[\(0, 1\)\] was not completed",
    ),
    (changed("restored", {"number": 5}, turns=[0, 0]), r"but its completed samples are \{1: 1\}"),
    (removed("restored", number=5), r"but its completed samples are \{1: 1\}"),
    (changed("restored", {"number": 4}, number=3), "group 3 was trained on in batch 0"),
    (changed("resume", {}, taken=0), "1 batches were taken"),
    (changed("resume", {}, numbers=[]), r"goes on with the groups \[\]; the log leaves \[4, 5\]"),
    (changed("resume", {}, numbers=[3, 4, 5]), r"goes on with the groups \[3, 4, 5\]"),
    (changed("resume", {}, num_batches=1), "1 of 1 batches were taken"),
    (doubled("update_weights"), "only 1 batches were taken"),
    (before("take", {"batch": 0}, event("update_weights", policy_version=7)), "only 0 batches were taken"),
    (
        changed("events_received", {}, events=[started([3, ["submit"]], [2, ["submit"]])]),
        r"started commands before its steps \[0, 3, 2\]",
    ),
    (
        before("command", {}, received(started([2, ["submit"]]))),
        r"its steps \[2, 0\]",
    ),
    (
        before("start", {"number": 5}, received(started([1, ["submit"]]))),
        r"its steps \[4, 1\]",
    ),
    (before("save", {}, event("gossip")), "lacks"),
    (before("save", {}, {"time_s": 1.0}), "lacks"),
    (before("save", {}, event("weights_loaded", engine="a")), r"lacks \['step'\]"),
]


def test_a_sound_log_is_believed_and_says_what_is_still_on_its_way():
    assert check_log(sound()) == []
    assert check_log(sound()[: find(sound(), "engine_lost")]) == [0, 1, 3, 4]


def test_a_sound_log_gives_the_state_of_a_resumed_controller():
    left = resumed_state(sound()[: find(sound(), "take")])
    assert (left["num_taken"], left["num_started"], left["repeats"]) == (0, 5, [])
    oldest_steps = {0: [0, 0], 1: [0, 0], 3: [0, 0], 4: None}
    assert left["groups"] == [[n, "p2" if n == 4 else f"p{n}", 0, oldest_steps[n]] for n in oldest_steps]
    dropped = resumed_state(sound()[: find(sound(), "start", number=4)])
    assert (dropped["num_started"], dropped["repeats"]) == (4, ["p2"])


@pytest.mark.parametrize("place", range(len(CORRUPTIONS)))
def test_every_corruption_is_found(place):
    corrupt, why = CORRUPTIONS[place]
    events = sound()
    corrupt(events)
    with pytest.raises(LogError, match=why):
        check_log(events)


def test_the_step_of_a_trajectory_is_that_of_its_oldest_turn():
    events = sound()
    place = find(events, "finish", number=5)
    second = event("completed", number=5, sample=1, turn=1, engine="a", oldest_step=1, newest_step=1)
    events.insert(place, second)
    assert check_log(events) == []
    with pytest.raises(LogError, match="sample 1, turn 1 of group 5 was completed before"):
        check_log([*events[:place], second, *events[place:]])
    late = aged("keep", {}, 2)
    turn = event("completed", number=0, sample=0, turn=1, engine="a", oldest_step=2, newest_step=2)
    late.insert(find(late, "finish", number=0), turn)
    assert check_log(late) == []


def aged(stale: str, withheld: dict[str, list[int]], staleness: int, order: str = "completion") -> Events:
    """Group 0 of three samples is trained on in batch 2, though its first token is of step 0."""
    rules = {**RULES, "groups_per_step": 1, "order": order, "stale": stale, "dynamic_sampling_rounds": 0}
    events = [
        event("begin", rules=rules, num_batches=3),
        event("weights_loaded", engine="a", step=0),
        event("start", number=0, prompt="p", step=0),
    ]
    for batch in (0, 1):
        number = batch + 1
        events += [
            event("start", number=number, prompt="p", step=batch),
            *finished(number, "a", batch),
            taken(batch, [number], [0]),
            event("weights_loaded", engine="a", step=number),
            event("weights_updated", step=number),
        ]
    events += [*finished(0, "a", 0, 1, 2), taken(2, [0], [staleness])]
    events[-1]["withheld"] = withheld
    return events


def test_the_staleness_bound_is_that_of_the_rules():
    assert check_log(aged("keep", {}, 2)) == []
    assert check_log(aged("withhold", {"0": [0]}, 1)) == []
    late = aged("keep", {}, 2)
    removed("weights_updated", step=1)(late)
    with pytest.raises(LogError, match="the weights are of step 0"):
        check_log(late)
    with pytest.raises(LogError, match="group 0 has staleness 2, more than 1"):
        check_log(aged("wait", {}, 2))
    with pytest.raises(LogError, match="group 0 has staleness 2, more than 1"):
        check_log(aged("withhold", {}, 2))
    with pytest.raises(LogError, match="group 0 has 1 trajectories left"):
        check_log(aged("withhold", {"0": [0, 1]}, 0))
    with pytest.raises(LogError, match=r"groups \[0\] started before \[1\]"):
        check_log(aged("keep", {}, 2, order="submission"))


def test_a_group_that_is_left_out_may_be_older():
    events = aged("wait", {}, 2)
    events[-1]["left_out"] = [0]
    assert check_log(events) == []


def test_no_event_can_be_lost_or_doubled():
    # The weight updates before a resume are repeated by the resume.
    events, loud = sound(), ("begin", "start", "completed", "finish", "drop", "take")
    for place, one in enumerate(events):
        if one["kind"] in loud:
            without = events[:place] + events[place + 1 :]
            twice = [*events[: place + 1], dict(one), *events[place + 1 :]]
            for corrupted in (without, twice):
                try:
                    left = check_log(corrupted)
                except LogError:
                    left = [-1]
                assert left, f"event {place}, {one}, was lost or doubled, and nobody saw it"


def test_events_are_flushed_at_each_take_and_rewound(tmp_path: Path):
    path, times = tmp_path / "events.log", iter(range(9))
    log = EventLog(path, lambda: next(times) + 0.1234567)
    log.add("start", number=0, prompt="ä", step=0, engine="a")
    assert path.read_bytes() == b""
    log.add("take", batch=0, numbers=[0], staleness=[0], left_out=[], withheld={})
    first, second = read_events(path)
    assert first == {
        "kind": "start", "time_s": 0.123457, "number": 0, "prompt": "ä", "step": 0, "engine": "a",
    }  # fmt: skip
    assert (second["kind"], second["time_s"]) == ("take", 1.123457)
    position = log.position
    log.add("weights_updated", step=1)
    assert log.position > position
    log.rewind(position)
    log.add("save", name="step-000001")
    log.close()
    assert [line["kind"] for line in read_events(path)] == ["start", "take", "save"]


def test_an_event_without_its_fields_is_refused(tmp_path: Path):
    log = EventLog(tmp_path / "events.log", lambda: 0.0)
    with pytest.raises(ValueError, match="event engine_lost lacks reason"):
        log.add("engine_lost", engine="a")
    with pytest.raises(ValueError, match="event gossip lacks such a kind"):
        log.add("gossip")
    log.close()
    assert read_events(tmp_path / "events.log") == []


def test_the_fields_of_an_event_are_copied_as_json_has_them(tmp_path: Path):
    log = EventLog(tmp_path / "events.log", lambda: 0.0)
    turns = [[0, ("submit", 2.5)], [1, ()]]
    reply = {"kind": "environment_reply", "id": "step-1", "token_ids": (4, 5), "reward": 0.5, "done": False}
    given = [reply, {"kind": "commands_started", "engine": "a", "commands": turns}]
    as_json = json.loads(json.dumps(given))
    log.add("events_received", events=given)
    turns.append([2, ()])
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            log.add("events_received", events=[{"kind": "environment_reply", "reward": value}])
    log.close()
    (event,) = read_log(tmp_path / "events.log")
    assert event["events"] == as_json
