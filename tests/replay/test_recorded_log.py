"""A log as what is to happen: cut where processes ended, and every line as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.eventlog.log import check_log, read_events
from millrace.replay.recorded_log import (
    RecordedBlockingRequests,
    RecordedLog,
    ReplayError,
    RunSegment,
    segments_of,
)
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.recorder import RecordingBackend
from millrace.types import SamplingParams
from tests.rollout.manual import Manual, Notes, rollouts_over, serving


def lines(kinds: str) -> list[dict[str, Any]]:
    """One event a letter; see `names`."""
    names = {
        "p": "weights_updated",
        "b": "begin",
        "h": "events_received",
        "t": "take",
        "s": "update_weights",
        "v": "save",
        "r": "resume",
    }
    more = {"rules": {"staleness": 0 if "p" in kinds else 2}}
    return [
        {"kind": names[letter], "events": [started("a", [i, ["submit"]])], **more}
        if letter == "h"
        else {"kind": names[letter], "place": i, **more}
        for i, letter in enumerate(kinds)
    ]


def started(engine: str, *commands: list[Any]) -> dict[str, Any]:
    return {"kind": "commands_started", "engine": engine, "commands": list(commands)}


def received(*events: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "events_received", "time_s": 1.0, "events": list(events)}


def cut(kinds: str, **options: Any) -> list[tuple[str, int, int]]:
    """The letters of each part, its first line, and where it leaves."""
    events = lines(kinds)
    found = segments_of(events, **options)
    return [("".join(kinds[events.index(e)] for e in p.events), p.first, p.last_step) for p in found]


@pytest.mark.parametrize(
    ("kinds", "options", "expected"),
    [
        ("bhtshtshv", {"finished": True}, [("bhtshtshv", 1, 0)]),
        # Killed: the last batch may not have been trained on.
        ("bhtshtsh", {"finished": False}, [("bhtsh", 1, 1)]),
        # Left after it was saved.
        ("bhtshtshv", {"finished": False}, [("bhtshtshv", 1, 2)]),
        ("bhtsvhtsh", {"finished": False}, [("bhtsvh", 1, 1)]),
        ("bhtsvrhtsv", {"finished": True}, [("bhtsv", 1, 1), ("rhtsv", 6, 0)]),
        ("bhtsvrhtshts", {"finished": True, "until": 2}, [("bhtsv", 1, 1), ("rhtsh", 6, 2)]),
        ("bhtsvrhtshts", {"finished": True, "until": 1}, [("bhtsv", 1, 1), ("rh", 6, 1)]),
        ("bhtshts", {"finished": True, "until": 2}, [("bhtshts", 1, 0)]),
        # Where sampling waits, before anything is drawn for the next batch.
        ("bhtshphhtshphts", {"finished": True, "until": 1}, [("bhtshp", 1, 1)]),
        ("bhtshphhtshphts", {"finished": False}, [("bhtshphhtshp", 1, 2)]),
        ("bhtspvhhts", {"finished": False}, [("bhtspv", 1, 1)]),
    ],
)
def test_a_log_is_cut_where_processes_ended(kinds, options, expected):
    assert cut(kinds, **options) == expected


@pytest.mark.parametrize(
    ("kinds", "options", "message"),
    [
        ("bhhh", {"finished": False}, "its event log has no whole batch to replay"),
        ("bhts", {"finished": False}, "its event log has no whole batch to replay"),
        ("bhtshts", {"finished": True, "until": 3}, "has 2 whole batches, so nothing begins after 3"),
        ("bhtshts", {"finished": False, "until": 2}, "has 1 whole batches, so nothing begins after 2"),
    ],
)
def test_a_log_without_that_batch_is_refused(kinds, options, message):
    with pytest.raises(ReplayError, match=message):
        segments_of(lines(kinds), **options)


def test_engines_go_on_beyond_the_last_line_and_begin_anew_at_a_resume():
    first, second = segments_of(lines("bhtsvrhtshth"), finished=True, until=2)
    assert first.turns() == {"a": [(1, ["submit"])]}
    # The last of them lies after what is repeated: an evaluation may have begun before.
    assert second.turns() == {"a": [(6, ["submit"]), (9, ["submit"]), (11, ["submit"])]}
    assert [line["kind"] for line in second.events][-1] == "events_received"


def test_each_part_is_repeated_with_the_threads_that_its_ranks_had():
    events = lines("bhtsvrhts")
    for place, ranks in ((6, [3, 4]), (1, [1, 2])):
        events.insert(place, {"kind": "threads", "ranks": ranks})
    parts = segments_of(events, finished=True)
    assert [part.threads for part in parts] == [[1, 2], [3, 4]]
    (older, *_) = segments_of(lines("bhtsvrhts"), finished=True)
    with pytest.raises(ReplayError, match="does not say how many threads its ranks had; it is not whole"):
        assert older.threads == []


def replayed(folder: Path, recorded: list[dict[str, Any]]) -> RecordedLog:
    return RecordedLog(folder / "events.log", lambda: 7.0, RunSegment(recorded, 40, 0))


TAKEN: dict[str, Any] = {"batch": 0, "numbers": [3], "staleness": [0], "left_out": [], "withheld": {}}
RECORDED = [
    received({"kind": "score_result", "id": "call-0"}),
    {"kind": "finish", "time_s": 1.0, "number": 3, "oldest_steps": [0, 1], "zero_std": False},
    {"kind": "command", "time_s": 1.0, "command": "stop_engine", "engine": "a", "reason": "it is late"},
    {
        "kind": "take",
        "time_s": 1.5,
        "batch": 0,
        "numbers": [3],
        "staleness": [0],
        "left_out": [],
        "withheld": {},
    },
]


def test_what_the_clock_decided_is_copied_and_all_else_is_as_it_was(tmp_path):
    log = replayed(tmp_path, RECORDED)
    assert log.replays
    assert not log.reached("take")
    log.add("events_received", events=[{"kind": "score_result", "id": "call-0"}])
    log.add("finish", number=3, oldest_steps=(0, 1), zero_std=False)
    assert log.reached("take")
    log.add("take", **TAKEN)
    assert log.head is None
    # A run that is left where it never left is saved there.
    assert log.reached("save")
    log.add("save", name="step-000001")
    log.close()
    told = [{**event, "time_s": 7.0} for event in [*RECORDED, {"kind": "save", "name": "step-000001"}]]
    assert read_events(tmp_path / "events.log") == told


@pytest.mark.parametrize(
    ("kind", "facts", "message"),
    [
        (
            "events_received",
            {"events": [{"kind": "score_result", "id": "call-1"}]},
            "events was [{'kind': 'score_result', 'id': 'call-0'}] in the run and is "
            "[{'kind': 'score_result', 'id': 'call-1'}]",
        ),
        (
            "update_weights",
            {"policy_version": 3},
            "kind was 'events_received' in the run and is 'update_weights'",
        ),
    ],
)
def test_the_first_line_that_differs_is_named(kind, facts, message, tmp_path):
    log = replayed(tmp_path, RECORDED)
    with pytest.raises(ReplayError) as caught:
        log.add(kind, **facts)
    assert str(caught.value) == f"event 40 of the run's event log, events_received: {message} in the replay"
    log.close()


def test_what_the_trainer_did_not_do_there_is_refused(tmp_path):
    log = replayed(tmp_path, RECORDED[3:])
    with pytest.raises(
        ReplayError, match="event 40 of .*: the run did take here, and the replay does update_weights"
    ):
        log.reached("update_weights")
    log.add("take", **TAKEN)
    with pytest.raises(ReplayError, match="the replay is not the run: its log ends before this take"):
        log.reached("take")
    log.close()


def test_recorded_commands_are_those_each_engine_started():
    events = [
        received(
            started("a", [0, ["update_weights"]], [0, ["submit", "blocking_submit"]]),
            started("b", [3, ["update_weights"]]),
        ),
        {"kind": "update_weights"},
        received(started("a", [9, ["submit"]])),
    ]
    assert RunSegment(events[:1], 1, 0, events[1:]).turns() == {
        "a": [(0, ["update_weights"]), (0, ["submit", "blocking_submit"]), (9, ["submit"])],
        "b": [(3, ["update_weights"])],
    }


def test_a_blocking_request_goes_to_the_recorded_engine():
    blocking = [("a", [0, 1, 2]), ("b", [1]), ("b", [3])]
    events = [received({"kind": "blocking_request", "engine": one, "requests": ids}) for one, ids in blocking]
    recorded = RecordedBlockingRequests(RunSegment(events, 1, 0).blocking_requests())

    def newest() -> str:
        raise AssertionError("the log chooses the engine")

    requests = recorded.add([(1,)] * 3, [SamplingParams()] * 3)
    # Engine a was lost before it had answered request 1.
    assert recorded.is_pending("a") and recorded.is_pending("b")
    assert recorded.place(requests, newest) == ("a", requests)
    for request in requests:
        recorded.complete("a", request.id, ValueError("refused"))
    assert not recorded.is_pending("a") and recorded.is_pending("b")
    assert recorded.missing(requests) == requests[1:2]
    assert recorded.place(requests[1:2], newest) == ("b", requests[1:2])
    recorded.complete("b", requests[1].id, ValueError("refused"))
    assert recorded.missing(requests) == []
    more = [GenerateRequest(f"blocking-{number}", (1,), SamplingParams()) for number in (4, 5, 6)]
    with pytest.raises(ReplayError, match="2 blocking requests .* the run submitted 1 to b"):
        recorded.place(more[:2], newest)
    with pytest.raises(ReplayError, match="1 blocking requests .* the run submitted 0 to no engine"):
        recorded.place(more[2:], newest)


def test_a_log_alone_says_what_is_decided(tmp_path):
    """Rollouts that get the recorded events at other times decide the same: also which engine is lost."""
    manual, notes, polled = Manual("a", "b"), Notes(), list[list[Any]]()
    backend = RecordingBackend(manual, notes.add)
    rollouts, _, _ = rollouts_over(backend, staleness=1, request_s=5.0, notes=notes)

    def handle(*events: Any) -> None:
        manual.events += events
        found = backend.poll()
        if found:
            polled.append(found)
        rollouts.handle(found)

    handle(*serving("a", "b"))
    ids = [id for _, _, told in manual.taken("submit") for id in told]
    handle(*[manual.generated(id) for id in ids if manual.requests[id][0] == "a"])
    manual.now_s = 6.0
    handle()
    assert manual.taken("stop") == [("stop", "b", "a request took longer than 5 s")]
    handle()
    again = [id for _, _, told in manual.taken("submit") for id in told]
    handle(*[manual.generated(id) for id in again])
    handle(*[manual.scored(id) for id in manual.calls])
    assert rollouts.take() is not None
    rollouts.update_weights(1)
    assert [event["events"] for event in notes.of("events_received")][2] == [
        {"kind": "engine_lost", "engine": "b", "reason": "a request took longer than 5 s"}
    ]
    check_log(notes)

    log = replayed(tmp_path, notes[1:])
    idle = Manual("a", "b")
    recorder = RecordingBackend(idle, log.add)
    other, _, _ = rollouts_over(recorder, staleness=1, log_event=log.add, begin=None)
    other._staleness._log_event = log.add
    other.begin(0)
    for events in polled:
        idle.events = list(events)
        other.handle(recorder.poll())
    assert log.reached("take") and other.take() is not None
    assert log.reached("update_weights")
    other.update_weights(1)
    assert log.head is None
    log.close()
