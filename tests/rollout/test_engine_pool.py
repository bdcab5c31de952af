"""Engines: nobody draws with weights that are not proved, and who does not answer is given up."""

from __future__ import annotations

import pytest

from millrace.eventlog.log import check_log
from millrace.rollout.backend import RETIRED, EngineJoined, EngineLost, ScaleRequest, WeightsLoaded
from millrace.rollout.engine_pool import DrawFailed, Engines
from tests.rollout.manual import Manual, rollouts_over, serving


def submitted(runtime):
    """Ids of the draws that were asked for since, by engine."""
    found: dict[str, list[str]] = {}
    for _, engine, ids in runtime.taken("submit"):
        found.setdefault(engine, []).extend(ids)
    return found


def train(rollouts, runtime, ids, *, version=0):
    """Draw and judge what was asked for, and take the batch."""
    rollouts.handle([runtime.drawn(id, version=version) for id in ids])
    rollouts.handle([runtime.judged(order[1]) for order in runtime.taken("judge")])
    return rollouts.take()


def test_tickets_are_free_once_every_engine_has_proved_the_weights():
    runtime = Manual("a", "b")
    rollouts, flow, notes = rollouts_over(runtime)
    rollouts.handle(serving("a", "b"))
    train(rollouts, runtime, sum(submitted(runtime).values(), []))
    runtime.orders.clear()
    rollouts.published(7)
    assert runtime.orders == [("load", "a", 7), ("load", "b", 7)]
    rollouts.handle([WeightsLoaded("a", 7, at=4)])
    assert flow.num_published == 0
    assert submitted(runtime) == {}
    rollouts.handle([WeightsLoaded("b", 7, at=6), WeightsLoaded("b", 7, at=6)])
    assert flow.num_published == 1
    assert sorted(submitted(runtime)) == ["a", "b"]
    assert [(e["engine"], e["version"], e["at"]) for e in notes.of("load")[2:]] == [("a", 1, 4), ("b", 1, 6)]
    assert len(notes.of("ignore")) == 1
    assert check_log(notes) == [2, 3]


def test_nobody_waits_for_an_engine_that_is_lost():
    runtime = Manual("a", "b")
    rollouts, flow, _ = rollouts_over(runtime)
    rollouts.handle(serving("a", "b"))
    train(rollouts, runtime, sum(submitted(runtime).values(), []))
    rollouts.published(7)
    rollouts.handle([*serving("a", version=7), EngineLost("b", "it died")])
    assert flow.num_published == 1
    assert list(submitted(runtime)) == ["a"]


def test_a_new_engine_draws_nothing_before_it_has_the_newest_weights():
    runtime = Manual("a")
    rollouts, flow, notes = rollouts_over(runtime, staleness=1)
    rollouts.handle(serving("a"))
    rollouts.handle([EngineJoined("b")])
    train(rollouts, runtime, submitted(runtime)["a"][:4])
    rollouts.published(1)
    rollouts.handle(serving("a", version=1))
    # Those it was sent first, which are old by the time it has them.
    rollouts.handle(serving("b", version=0))
    assert list(submitted(runtime)) == ["a"]
    assert flow.num_published == 1
    rollouts.handle([*serving("b", version=1), EngineLost("a", "it died")])
    assert list(submitted(runtime)) == ["b"]
    assert check_log(notes) == [2, 3, 4, 5]


def test_an_engine_that_was_lost_does_not_join_again():
    """Its messages may come in another order than they were sent."""
    runtime = Manual("a")
    rollouts, _, _ = rollouts_over(runtime)
    rollouts.handle([EngineLost("b", "it died"), EngineJoined("b"), EngineJoined("c"), EngineJoined("c")])
    assert runtime.taken("load") == [("load", "a", 0), ("load", "c", 0)]


def test_what_was_drawn_with_new_weights_is_used_once_they_are_proved():
    runtime = Manual("a", "b")
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a"))
    ids = submitted(runtime)["a"]
    train(rollouts, runtime, ids[:2])
    rollouts.published(1)
    # The draw overtook the proof; the engine that says it first has proved nothing.
    rollouts.handle([runtime.drawn(id, version=1) for id in ids[2:]])
    assert notes.of("arrive")[2:] == []
    rollouts.handle(serving("a", version=1))
    assert [(e["oldest"], e["newest"]) for e in notes.of("arrive")[2:]] == [(1, 1), (1, 1)]
    assert check_log(notes) == [1, 2]


def test_what_an_engine_drew_without_proof_is_drawn_again_when_it_is_lost():
    runtime = Manual("a", "b")
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a"))
    ids = submitted(runtime)["a"]
    train(rollouts, runtime, ids[:2])
    rollouts.published(1)
    rollouts.handle([runtime.drawn(id, version=1) for id in ids[2:]])
    rollouts.handle([EngineLost("a", "it does not hold version 1"), *serving("b", version=1)])
    assert len(submitted(runtime)["b"]) == 4
    assert len(notes.of("arrive")) == 2


def test_weights_that_were_never_published_draw_nothing():
    runtime = Manual("a")
    rollouts, _, _ = rollouts_over(runtime)
    rollouts.handle(serving("a"))
    with pytest.raises(DrawFailed, match=r"version 5, which was never published"):
        rollouts.handle([runtime.drawn(submitted(runtime)["a"][0], version=5)])


def test_a_step_that_was_left_out_sends_nothing():
    """The weights are those that every engine holds, so the publish is in force at once."""
    runtime = Manual("a", "b")
    rollouts, flow, notes = rollouts_over(runtime)
    rollouts.handle(serving("a"))
    runtime.orders = [order for order in runtime.orders if order[0] != "load"]
    train(rollouts, runtime, submitted(runtime)["a"])
    rollouts.published(0)
    assert runtime.taken("load") == []
    assert flow.num_published == 1
    # The one that had not proved them yet serves as well once it has.
    rollouts.handle([*serving("b"), EngineLost("a", "it died")])
    assert list(submitted(runtime)) == ["a", "b"]
    assert [(e["engine"], e["version"]) for e in notes.of("load")] == [("a", 0), ("a", 1), ("b", 1)]
    assert check_log(notes) == [2, 3]


def test_two_publishes_may_be_under_way():
    runtime = Manual("a", "b")
    rollouts, flow, notes = rollouts_over(runtime, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a", "b"))
    ids = submitted(runtime)
    train(rollouts, runtime, ids["a"])
    rollouts.published(1)
    train(rollouts, runtime, ids["b"])
    rollouts.published(2)
    rollouts.handle([*serving("a", version=2), *serving("b", version=1)])
    assert flow.num_published == 1
    rollouts.handle(serving("b", version=2))
    assert flow.num_published == 2
    assert check_log(notes) == [2]


@pytest.mark.world
@pytest.mark.parametrize(
    "late, reason",
    [("draw", "a draw took longer than 10 s"), ("load", "version 1 took longer than 4 s to load")],
)
def test_who_does_not_answer_in_time_is_given_up(late, reason):
    runtime = Manual("a", "b")
    limits = {"draw_s": 10.0} if late == "draw" else {"load_s": 4.0}
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1, staleness=1, **limits)
    rollouts.handle(serving("a", "b"))
    ids = submitted(runtime)
    if late == "load":
        train(rollouts, runtime, ids["a"])
        rollouts.handle([runtime.drawn(id) for id in ids["b"]])
        runtime.now_s = 50.0
        rollouts.published(1)
        rollouts.handle(serving("b", version=1))
        expected_s = 54.0
    else:
        runtime.now_s = 2.0
        rollouts.handle([runtime.drawn(id) for id in ids["b"]])
        expected_s = 10.0
    while not notes.of("lost"):
        assert rollouts.patience_s(100.0) == expected_s - runtime.now_s
        rollouts.advance(100.0)
    assert runtime.now_s == expected_s
    assert runtime.taken("lose") == [("lose", "a", reason)]
    # The runtime says so as well.
    rollouts.handle([EngineLost("a", reason)])
    assert [(e["engine"], e["reason"]) for e in notes.of("lost")] == [("a", reason)]
    if late == "draw":
        assert list(submitted(runtime)) == ["b"]


def test_only_those_who_are_late_are_given_up():
    runtime = Manual("a")
    rollouts, _, notes = rollouts_over(runtime, load_s=4.0, draw_s=9.0)
    runtime.now_s = 3.0
    rollouts.handle([EngineJoined("b")])
    runtime.now_s = 5.0
    assert rollouts.patience_s(100.0) == 0.0
    rollouts.handle([])
    assert [event["engine"] for event in notes.of("lost")] == ["a"]
    assert rollouts.patience_s(100.0) == 2.0
    rollouts.handle(serving("b"))
    assert len(submitted(runtime)["b"]) == 4
    runtime.now_s = 8.0
    rollouts.handle([])
    assert rollouts.patience_s(100.0) == 6.0
    assert len(notes.of("lost")) == 1


def test_the_oldest_and_the_newest_token_of_a_draw_count():
    """Weights that came in flight: what is not proved is not used; the oldest token says how old it is."""
    runtime = Manual("a")
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a"))
    ids = submitted(runtime)["a"]
    train(rollouts, runtime, ids[:2])
    rollouts.published(1)
    rollouts.handle([runtime.drawn(id, version=(0, 1)) for id in ids[2:]])
    assert len(notes.of("arrive")) == 2
    rollouts.handle(serving("a", version=1))
    assert [(e["oldest"], e["newest"]) for e in notes.of("arrive")[2:]] == [(0, 1), (0, 1)]
    rollouts.handle([runtime.judged(order[1]) for order in runtime.taken("judge")])
    assert rollouts.take().taken.staleness == (1,)


def test_newer_weights_are_no_excuse_for_who_proves_none():
    runtime = Manual("a")
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1, load_s=4.0)
    rollouts.handle([*serving("a"), EngineJoined("b"), EngineJoined("c")])
    for version, now_s in ((1, 3.0), (2, 5.0)):
        train(rollouts, runtime, submitted(runtime)["a"], version=version - 1)
        runtime.now_s = now_s
        rollouts.published(version)
        # Engine c is behind, but it gets on.
        rollouts.handle([*serving("a", version=version), *serving("c", version=version - 1)])
    assert [event["engine"] for event in notes.of("lost")] == ["b"]
    runtime.now_s = 8.5
    rollouts.handle([])
    assert len(notes.of("lost")) == 1
    runtime.now_s = 9.0
    rollouts.handle([])
    assert [event["engine"] for event in notes.of("lost")] == ["b", "c"]


def test_weights_are_taken_when_they_are_published_also_while_no_engine_is_there():
    """By the time another engine joins, the trainer may be in the middle of a step."""
    runtime = Manual("a")
    rollouts, _, _ = rollouts_over(runtime, staleness=1)
    rollouts.handle(serving("a"))
    train(rollouts, runtime, submitted(runtime)["a"][:4])
    rollouts.handle([EngineLost("a", "it died")])
    assert runtime.offered == 0
    rollouts.published(5)
    assert (runtime.offered, runtime.taken("load")) == (5, [("load", "a", 0)])
    rollouts.handle([EngineJoined("b")])
    assert runtime.taken("load") == [("load", "b", 5)]


def wants(notes):
    return [(event["engines"], event["leaving"], event["reason"]) for event in notes.of("want")]


def test_an_engine_that_is_added_draws_and_one_that_leaves_hands_over_what_it_has():
    runtime = Manual("a")
    rollouts, _, notes = rollouts_over(runtime, num_batches=4, groups_per_step=1, staleness=2)
    rollouts.handle(serving("a"))
    first = submitted(runtime)["a"]
    rollouts.handle([ScaleRequest(2)])
    assert runtime.taken("want") == [("want", 2)]
    rollouts.handle([EngineJoined("b"), *serving("b")])
    train(rollouts, runtime, first[:2])
    rollouts.published(1)
    rollouts.handle([*serving("a", version=1), *serving("b", version=1)])
    (ids,) = submitted(runtime).values()
    assert rollouts.engines().doing == {"a": "draws 4 answers", "b": "draws 2 answers"}
    rollouts.handle([ScaleRequest(1)])
    # Who draws least leaves; the other one gets nothing before it was handed over.
    assert (runtime.taken("abort"), runtime.taken("retire")) == ([("abort", "b", ids)], [])
    assert rollouts.engines().doing["b"] == "leaves, hands over 2 answers"
    rollouts.handle([runtime.drawn(ids[0], version=1, reason="abort")])
    assert runtime.taken("retire") == []
    (again,) = submitted(runtime)["a"]
    assert runtime.draws[again][1].drawn.token_ids == (runtime.draws[ids[0]][1].params.seed, 9)
    rollouts.handle([runtime.drawn(ids[1], version=1)])
    assert runtime.taken("retire") == [("retire", "b")]
    rollouts.handle([EngineLost("b", RETIRED)])
    assert rollouts.engines().doing.keys() == {"a"}
    assert wants(notes) == [(2, [], ""), (1, ["b"], "")]
    assert [event["kind"] for event in notes.of("part", "lost")] == ["part", "lost"]
    assert check_log(notes) == [1, 2, 3]


def test_who_leaves_stays_where_another_one_is_lost():
    runtime = Manual("a", "b")
    rollouts, _, notes = rollouts_over(runtime)
    rollouts.handle(serving("a", "b"))
    ids = submitted(runtime)
    rollouts.handle([ScaleRequest(1)])
    ((_, leaving, _),) = runtime.taken("abort")
    other = "a" if leaving == "b" else "b"
    rollouts.handle([EngineLost(other, "it died")])
    assert list(submitted(runtime)) == [leaving]
    rollouts.handle([runtime.drawn(id, reason="abort") for id in ids[leaving]])
    assert list(submitted(runtime)) == [leaving]
    assert runtime.taken("retire") == []
    assert wants(notes) == [(1, [leaving], ""), (1, [], "")]
    assert check_log(notes) == [0, 1]


def test_who_draws_nothing_leaves_first_and_the_newest_of_those():
    runtime = Manual("a", "b")
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1)
    rollouts.handle(serving("a", "b"))
    (drawer,) = submitted(runtime)
    rollouts.handle([EngineJoined("c"), EngineJoined("d"), *serving("c"), ScaleRequest(2)])
    assert runtime.taken("retire") == [("retire", "d"), ("retire", "c")]
    assert runtime.taken("abort") == []
    rollouts.handle([ScaleRequest(1)])
    (idle,) = {"a", "b"} - {drawer}
    assert runtime.taken("retire") == [("retire", idle)]
    # It had started before anybody heard that it is too many.
    rollouts.handle([EngineJoined("e")])
    assert runtime.taken("retire") == [("retire", "e")]
    assert wants(notes)[-1] == (1, sorted([idle, "c", "d", "e"], key="abcde".index), "")
    assert check_log(notes) == [0]


def test_what_cannot_be_had_is_told():
    runtime = Manual("a")
    rollouts, _, notes = rollouts_over(runtime)
    assert rollouts.engines() == Engines(0, {"a": "loads its first weights"})
    rollouts.handle([*serving("a"), ScaleRequest(3), ScaleRequest(1, "there is no room")])
    found = rollouts.engines()
    assert (found.wanted, found.reason) == (1, "there is no room")
    assert found.lines("r") == [
        "run r: 1 engine wanted, 1 there",
        "  a draws 4 answers",
        "  no more: there is no room",
    ]
    rollouts.handle([ScaleRequest(2)])
    assert rollouts.engines().lines("r")[2:] == ["  1 starting"]
    assert wants(notes) == [(3, [], ""), (1, [], "there is no room"), (2, [], "")]


def test_nobody_with_older_weights_goes_on_from_what_was_handed_over():
    runtime = Manual("a", "b")
    rollouts, _, notes = rollouts_over(runtime, num_batches=4, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a", "b"))
    ids = submitted(runtime)
    train(rollouts, runtime, ids["a"])
    rollouts.published(1)
    # While b draws, it gets the new weights before a does.
    rollouts.handle(serving("b", version=1))
    rollouts.hold()
    handed_over = [runtime.drawn(id, version=(0, 1), reason="abort") for id in ids["b"]]
    rollouts.handle([*handed_over, EngineLost("b", "it died")])
    rollouts.release()
    assert submitted(runtime) == {}
    rollouts.handle(serving("a", version=1))
    # Those two, and the group that the publish made room for.
    assert [len(each) for each in submitted(runtime).values()] == [4]
    assert check_log(notes) == [1, 2]
