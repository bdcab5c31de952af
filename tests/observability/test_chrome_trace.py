"""Runs as Chrome traces: who did what, when, and in which lane."""

from __future__ import annotations

from typing import Any

from millrace.eventlog.log import read_events
from millrace.observability.chrome_trace import chrome_trace
from tests.rollout.written import write_run


def event(kind: str, time_s: float, **args: Any) -> dict[str, Any]:
    return {"kind": kind, "time_s": time_s, **args}


def arrived(kind: str, time_s: float, sample: int, engine: str) -> dict[str, Any]:
    return event(kind, time_s, number=0, sample=sample, turn=0, engine=engine, began=2, ended=5)


def told(events: list[dict[str, Any]], *spans: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """By worker: (lane, what, begin, end, facts) of each slice, in order of their begin."""
    trace = chrome_trace(events, spans)["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in trace if one["name"] == "process_name"}
    found: dict[str, list[Any]] = {name: [] for name in names.values()}
    for one in trace:
        if one["ph"] == "X":
            begin, end = one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6
            row = (one["tid"], one["name"], round(begin, 6), round(end, 6), one["args"])
            found[names[one["pid"]]].append(row)
    return found


def test_who_draws_at_once_has_lanes_of_his_own():
    events = [
        event("weights_loaded", 1.0, engine="engine-10", step=0),
        event("weights_loaded", 1.0, engine="engine-2", step=0),
        event("dispatch", 2.0, number=0, samples=[0, 1], turn=0, engine="engine-2"),
        event("dispatch", 2.5, number=0, samples=[2], turn=0, engine="engine-10"),
        arrived("partial", 3.0, 0, "engine-2"),
        event("dispatch", 3.5, number=0, samples=[0], turn=0, engine="engine-2"),
        arrived("completed", 4.0, 1, "engine-2"),
        event("engine_lost", 5.0, engine="engine-10", reason="it died"),
        arrived("completed", 6.0, 0, "engine-2"),
        event("score", 6.0, call="call-0", numbers=[0]),
        event(
            "events_received",
            7.0,
            events=[{"kind": "score_result", "id": "call-0"}, {"kind": "generate_result", "id": "0.9.9"}],
        ),
    ]
    generated = {"turn": 0, "tokens": 3}
    assert told(events) == {
        "trainer": [],
        "rewards": [(2, "call-0", 6.0, 7.0, {"groups": [0]})],
        "engine-2": [
            (1, "weights", 1.0, 1.0, {"step": 0}),
            (2, "group 0, sample 0", 2.0, 3.0, {**generated, "how": "partial"}),
            (3, "group 0, sample 1", 2.0, 4.0, {**generated, "how": "completed"}),
            (2, "group 0, sample 0", 3.5, 6.0, {**generated, "how": "completed"}),
        ],
        "engine-10": [
            (1, "weights", 1.0, 1.0, {"step": 0}),
            (2, "group 0, sample 2", 2.5, 5.0, {"how": "lost"}),
        ],
    }


def test_what_nobody_wants_any_more_or_still_runs_ends_too():
    events = [
        event("weights_loaded", 1.0, engine="a", step=0),
        event("dispatch", 2.0, number=0, samples=[0, 1], turn=0, engine="a"),
        event("dispatch", 2.0, number=1, samples=[0], turn=0, engine="a"),
        event("drop", 3.0, number=0, reason="stale"),
        event("take", 4.0, batch=0),
    ]
    assert [row[1:] for row in told(events)["a"]] == [
        ("weights", 1.0, 1.0, {"step": 0}),
        ("group 0, sample 0", 2.0, 3.0, {"how": "dropped"}),
        ("group 0, sample 1", 2.0, 3.0, {"how": "dropped"}),
        ("group 1, sample 0", 2.0, 4.0, {"how": "under way"}),
    ]


def test_weights_are_under_way_from_when_they_are_sent():
    events = [
        event("weights_loaded", 1.0, engine="a", step=0),
        event("update_weights", 4.0, policy_version=7),
        event("engine_joined", 5.0, engine="b"),
        event("weights_loaded", 6.0, engine="a", step=1),
        event("weights_loaded", 8.0, engine="b", step=1),
        event("take", 9.0, batch=1),
        event("save", 9.5, name="step-000001"),
    ]
    found = told(events)
    assert [row[2:4] for row in found["a"]] == [(1.0, 1.0), (4.0, 6.0)]
    assert [row[2:4] for row in found["b"]] == [(5.0, 8.0)]
    moments = [one for one in chrome_trace(events, [])["traceEvents"] if one["ph"] == "i"]
    assert [(one["name"], one["ts"]) for one in moments] == [
        ("update weights, policy version 7", 4e6),
        ("take batch 1", 9e6),
        ("save step-000001", 9.5e6),
    ]


def test_what_a_process_left_ends_where_the_next_one_begins():
    events = [
        event("weights_loaded", 1.0, engine="a", step=0),
        event("dispatch", 2.0, number=0, samples=[0], turn=0, engine="a"),
        event("score", 2.0, call="call-0", numbers=[1]),
        event("resume", 3.0),
        event("weights_loaded", 4.0, engine="a", step=0),
        event("update_weights", 5.0, policy_version=1),
        event("weights_loaded", 6.0, engine="a", step=1),
    ]
    found = told(events)
    assert [row[1:] for row in found["a"]] == [
        ("weights", 1.0, 1.0, {"step": 0}),
        ("group 0, sample 0", 2.0, 3.0, {"how": "left"}),
        ("weights", 4.0, 4.0, {"step": 0}),
        ("weights", 5.0, 6.0, {"step": 1}),
    ]
    assert found["rewards"] == []


def test_spans_of_a_part_that_was_lost_are_left_out():
    spans = [
        {"name": "sample", "begin_s": 1.0, "seconds": 1.0},
        {"name": "train", "begin_s": 2.0, "seconds": 2.0},
        {"name": "save", "begin_s": 4.0, "seconds": 0.5},
        {"name": "sample", "begin_s": 4.5, "seconds": 9.0},
        # Taken up from the checkpoint.
        {"name": "sample", "begin_s": 4.6, "seconds": 1.0},
    ]
    rows = [("sample", 1.0, 2.0), ("train", 2.0, 4.0), ("save", 4.0, 4.5), ("sample", 4.6, 5.6)]
    assert [(*row[1:4],) for row in told([], spans)["trainer"]] == rows


def test_each_rank_is_a_process_of_its_own():
    first = [
        {"name": "sample", "begin_s": 1.0, "seconds": 1.0},
        {"name": "train", "begin_s": 2.0, "seconds": 2.0},
    ]
    other = [
        {"name": "sample", "begin_s": 0.5, "seconds": 1.5},
        {"name": "train", "begin_s": 2.0, "seconds": 1.5},
    ]
    found = told([event("weights_loaded", 1.0, engine="a", step=0)], first, other)
    assert list(found) == ["trainer rank 0", "trainer rank 1", "rewards", "a"]
    assert found["trainer rank 0"] == [(1, "sample", 1.0, 2.0, {}), (1, "train", 2.0, 4.0, {})]
    assert found["trainer rank 1"] == [(1, "sample", 0.5, 2.0, {}), (1, "train", 2.0, 3.5, {})]


def test_all_that_a_run_did_is_in_its_trace(tmp_path, monkeypatch):
    """And no two slices of a lane are at the same time."""
    write_run(tmp_path, monkeypatch, staleness=2, num_engines=3)
    events = read_events(tmp_path / "events.log")
    found = told(events)
    arrivals = [one for one in events if one["kind"] == "completed"]
    draws = [row for name, rows in found.items() if "engine" in name for row in rows if "group" in row[1]]
    assert len(draws) == len(arrivals) > 300
    assert sum(row[4]["tokens"] for row in draws) == sum(one["ended"] - one["began"] for one in arrivals)
    for rows in found.values():
        last: dict[int, float] = {}
        for lane, _, begin_s, end_s, _ in rows:
            assert last.get(lane, 0.0) <= begin_s <= end_s
            last[lane] = end_s


def test_parts_are_inside_their_span_and_those_of_a_lost_step_are_left_out():
    def span(name: str, begin_s: float, end_s: float) -> dict[str, object]:
        return {"name": name, "begin_s": begin_s, "seconds": end_s - begin_s}

    lost = [span("train/policy", 6.0, 7.0), span("train", 5.0, 8.0)]
    kept = [span("train/pack", 0.0, 1.0), span("train/policy", 1.0, 3.0), span("train", 0.0, 4.0)]
    again = [span("train/policy", 5.5, 7.5), span("train", 4.5, 8.0)]
    trace = chrome_trace([], [[*kept, *lost, *again]])
    found = [(one["name"], one["ts"] / 1e6) for one in trace["traceEvents"] if one["ph"] == "X"]
    assert sorted(found, key=lambda one: one[1]) == sorted(
        [("train/pack", 0.0), ("train", 0.0), ("train/policy", 1.0), ("train", 4.5), ("train/policy", 5.5)],
        key=lambda one: one[1],
    )
    assert {one["tid"] for one in trace["traceEvents"] if one["ph"] == "X"} == {1}
