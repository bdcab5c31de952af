"""A log as what is to happen: cut where processes ended, and every line as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.engines.recorded import RecordedCommands, ReplayError
from millrace.eventlog.log import check_log, read_events
from millrace.replay.recorded_log import RecordedLog, RunSegment, segments_of
from tests.rollout.manual import Manual, rollouts_over, serving


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
        "o": "commands_started",
    }
    more = {"engine": "a", "rules": {"staleness": 0 if "p" in kinds else 2}}
    return [{"kind": names[letter], "commands": [[i, ["submit"]]], **more} for i, letter in enumerate(kinds)]


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
        ("bhtshpohhtshphts", {"finished": True, "until": 1}, [("bhtshpo", 1, 1)]),
        ("bhtshpohhtshphts", {"finished": False}, [("bhtshpohhtshp", 1, 2)]),
        ("bhtspvohhts", {"finished": False}, [("bhtspvo", 1, 1)]),
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
    first, second = segments_of(lines("bohtsovrohtoshto"), finished=True, until=2)
    assert first.recorded.turns("a") == [(1, 1), (5, 1)]
    # The last of them lies after what is repeated: an evaluation may have begun before.
    assert second.recorded.turns("a") == [(8, 1), (11, 1), (15, 1)]
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
    return RecordedLog(folder / "events.log", lambda: 7.0, RunSegment(recorded, 40, RecordedCommands([]), 0))


TAKEN: dict[str, Any] = {"batch": 0, "numbers": [3], "staleness": [0], "left_out": [], "withheld": {}}
RECORDED = [
    {"kind": "events_received", "time_s": 1.0, "events": ["scored call-0"]},
    {"kind": "finish", "time_s": 1.0, "number": 3, "oldest_steps": [0, 1], "zero_std": False},
    {"kind": "commands_started", "time_s": 1.0, "engine": "a", "commands": [[0, ["submit"]]]},
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


def test_what_engines_took_up_is_copied_and_all_else_is_as_it_was(tmp_path):
    log = replayed(tmp_path, RECORDED)
    assert log.replays
    assert not log.reached("take")
    log.add("events_received", events=["scored call-0"])
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
            {"events": ["scored call-1"]},
            "events was ['scored call-0'] in the run and is ['scored call-1']",
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


def test_a_log_alone_says_what_is_decided(tmp_path):
    """Rollouts that hear what others heard, at other times, decide the same: also who is given up."""
    backend = Manual("a", "b")
    rollouts, _, notes = rollouts_over(backend, staleness=1, request_s=5.0)
    heard: list[list[Any]] = []
    handle = rollouts._handle_all
    rollouts._handle_all = lambda events: (heard.append(list(events)), handle(events))[1]
    rollouts.handle(serving("a", "b"))
    ids = [id for _, _, told in backend.taken("submit") for id in told]
    rollouts.handle([backend.generated(id) for id in ids if backend.requests[id][0] == "a"])
    backend.now_s = 6.0
    rollouts.handle([])
    assert backend.taken("lose") == [("lose", "b", "a request took longer than 5 s")]
    again = [id for _, _, told in backend.taken("submit") for id in told]
    rollouts.handle([backend.generated(id) for id in again])
    rollouts.handle([backend.scored(id) for id in backend.calls])
    assert rollouts.take() is not None
    rollouts.update_weights(1)
    assert [event["events"] for event in notes.of("events_received")][2] == [
        "engine_lost b a request took longer than 5 s"
    ]
    check_log(notes)

    log = replayed(tmp_path, notes[1:])
    idle = Manual("a", "b")
    other, _, repeated = rollouts_over(idle, staleness=1, notes=None, log_event=log.add, begin=None)
    other._staleness._log_event = other._pool._log_event = log.add
    other.begin(0)
    for events in (events for events in heard if events):
        other.handle(events)
    assert log.reached("take") and other.take() is not None
    assert log.reached("update_weights")
    other.update_weights(1)
    assert log.head is None
    log.close()
