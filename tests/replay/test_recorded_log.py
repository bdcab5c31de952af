"""A log as what is to happen: cut where processes ended, and every line as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.engines.recorded import RecordedCommands, ReplayError
from millrace.eventlog.log import check_log, read_events
from millrace.replay.recorded_log import RecordedLog, RunSegment, parts_of
from tests.rollout.manual import Manual, rollouts_over, serving


def lines(kinds: str) -> list[dict[str, Any]]:
    """One event a letter: p(ublish), b(egin), h(eard), t(ake), s(end), v (save), r(esume), o (took)."""
    names = {
        "p": "publish",
        "b": "begin",
        "h": "heard",
        "t": "take",
        "s": "send",
        "v": "save",
        "r": "resume",
        "o": "took",
    }
    more = {"engine": "a", "rules": {"staleness": 0 if "p" in kinds else 2}}
    return [{"kind": names[letter], "orders": [[i, "s"]], **more} for i, letter in enumerate(kinds)]


def cut(kinds: str, **options: Any) -> list[tuple[str, int, int]]:
    """The letters of each part, its first line, and where it leaves."""
    events = lines(kinds)
    found = parts_of(events, **options)
    return [("".join(kinds[events.index(e)] for e in p.lines), p.first, p.leaves_at) for p in found]


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
        parts_of(lines(kinds), **options)


def test_engines_go_on_beyond_the_last_line_and_begin_anew_at_a_resume():
    first, second = parts_of(lines("bohtsovrohtoshto"), finished=True, until=2)
    assert first.script.turns("a") == [(1, 1), (5, 1)]
    # The last of them lies after what is repeated: an evaluation may have begun before it was told.
    assert second.script.turns("a") == [(8, 1), (11, 1), (15, 1)]
    assert [line["kind"] for line in second.lines][-1] == "heard"


def test_each_part_is_repeated_with_the_threads_that_its_ranks_had():
    events = lines("bhtsvrhts")
    for place, ranks in ((6, [3, 4]), (1, [1, 2])):
        events.insert(place, {"kind": "threads", "ranks": ranks})
    parts = parts_of(events, finished=True)
    assert [part.threads for part in parts] == [[1, 2], [3, 4]]
    (older, *_) = parts_of(lines("bhtsvrhts"), finished=True)
    with pytest.raises(ReplayError, match="does not say how many threads its ranks had; it is not whole"):
        assert older.threads == []


def replayed(folder: Path, recorded: list[dict[str, Any]]) -> RecordedLog:
    return RecordedLog(folder / "events.log", lambda: 7.0, RunSegment(recorded, 40, RecordedCommands([]), 0))


TAKEN: dict[str, Any] = {"batch": 0, "numbers": [3], "staleness": [0], "left_out": [], "withheld": {}}
RECORDED = [
    {"kind": "heard", "time_s": 1.0, "events": ["judged call-0"]},
    {"kind": "finish", "time_s": 1.0, "number": 3, "births": [0, 1], "equal": False},
    {"kind": "took", "time_s": 1.0, "engine": "a", "orders": [[0, "s"]]},
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
    log.add("heard", events=["judged call-0"])
    log.add("finish", number=3, births=(0, 1), equal=False)
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
            "heard",
            {"events": ["judged call-1"]},
            "events was ['judged call-0'] in the run and is ['judged call-1']",
        ),
        ("send", {"version": 3}, "kind was 'heard' in the run and is 'send'"),
    ],
)
def test_the_first_line_that_differs_is_named(kind, facts, message, tmp_path):
    log = replayed(tmp_path, RECORDED)
    with pytest.raises(ReplayError) as caught:
        log.add(kind, **facts)
    assert str(caught.value) == f"event 40 of the run's event log, heard: {message} in the replay"
    log.close()


def test_what_the_trainer_did_not_do_there_is_refused(tmp_path):
    log = replayed(tmp_path, RECORDED[3:])
    with pytest.raises(ReplayError, match="event 40 of .*: the run did take here, and the replay does send"):
        log.reached("send")
    log.add("take", **TAKEN)
    with pytest.raises(ReplayError, match="the replay is not the run: its log ends before this take"):
        log.reached("take")
    log.close()


def test_a_log_alone_says_what_is_decided(tmp_path):
    """Rollouts that hear what others heard, at other times, decide the same: also who is given up."""
    runtime = Manual("a", "b")
    rollouts, _, notes = rollouts_over(runtime, staleness=1, draw_s=5.0)
    heard: list[list[Any]] = []
    handle = rollouts._hear
    rollouts._hear = lambda events: (heard.append(list(events)), handle(events))[1]
    rollouts.handle(serving("a", "b"))
    ids = [id for _, _, told in runtime.taken("submit") for id in told]
    rollouts.handle([runtime.drawn(id) for id in ids if runtime.draws[id][0] == "a"])
    runtime.now_s = 6.0
    rollouts.handle([])
    assert runtime.taken("lose") == [("lose", "b", "a draw took longer than 5 s")]
    again = [id for _, _, told in runtime.taken("submit") for id in told]
    rollouts.handle([runtime.drawn(id) for id in again])
    rollouts.handle([runtime.judged(id) for id in runtime.calls])
    assert rollouts.take() is not None
    rollouts.published(1)
    assert [event["events"] for event in notes.of("heard")][2] == ["lost b a draw took longer than 5 s"]
    check_log(notes)

    log = replayed(tmp_path, notes[1:])
    idle = Manual("a", "b")
    other, _, repeated = rollouts_over(idle, staleness=1, notes=None, note=log.add, begin=None)
    other._flow._note = other._fleet._note = log.add
    other.begin(0)
    for events in (events for events in heard if events):
        other.handle(events)
    assert log.reached("take") and other.take() is not None
    assert log.reached("send")
    other.published(1)
    assert log.head is None
    log.close()
