"""Engines: nobody draws with weights that are not proved, and who does not answer is given up."""

from __future__ import annotations

import pytest

from millrace.eventlog.log import check_log
from millrace.rollout.backend import DRAINED, EngineJoined, EngineLost, ScaleRequest, WeightsLoaded
from millrace.rollout.engine_pool import Engines, GenerationFailed
from tests.rollout.manual import Manual, rollouts_over, serving


def submitted(backend):
    """Ids of the draws that were asked for since, by engine."""
    found: dict[str, list[str]] = {}
    for _, engine, ids in backend.taken("submit"):
        found.setdefault(engine, []).extend(ids)
    return found


def train(rollouts, backend, ids, *, version=0):
    """Draw and judge what was asked for, and take the batch."""
    rollouts.handle([backend.generated(id, version=version) for id in ids])
    rollouts.handle([backend.scored(command[1]) for command in backend.taken("score")])
    return rollouts.take()


def test_tickets_are_free_once_every_engine_has_proved_the_weights():
    backend = Manual("a", "b")
    rollouts, controller, notes = rollouts_over(backend)
    rollouts.handle(serving("a", "b"))
    train(rollouts, backend, sum(submitted(backend).values(), []))
    backend.commands.clear()
    rollouts.update_weights(7)
    assert backend.commands == [("load", "a", 7), ("load", "b", 7)]
    rollouts.handle([WeightsLoaded("a", 7, at=4)])
    assert controller.num_updates == 0
    assert submitted(backend) == {}
    rollouts.handle([WeightsLoaded("b", 7, at=6), WeightsLoaded("b", 7, at=6)])
    assert controller.num_updates == 1
    assert sorted(submitted(backend)) == ["a", "b"]
    assert [(e["engine"], e["step"], e["at"]) for e in notes.of("weights_loaded")[2:]] == [
        ("a", 1, 4),
        ("b", 1, 6),
    ]
    assert len(notes.of("ignored")) == 1
    assert check_log(notes) == [2, 3]


def test_nobody_waits_for_an_engine_that_is_lost():
    backend = Manual("a", "b")
    rollouts, controller, _ = rollouts_over(backend)
    rollouts.handle(serving("a", "b"))
    train(rollouts, backend, sum(submitted(backend).values(), []))
    rollouts.update_weights(7)
    rollouts.handle([*serving("a", version=7), EngineLost("b", "it died")])
    assert controller.num_updates == 1
    assert list(submitted(backend)) == ["a"]


def test_a_new_engine_draws_nothing_before_it_has_the_newest_weights():
    backend = Manual("a")
    rollouts, controller, notes = rollouts_over(backend, staleness=1)
    rollouts.handle(serving("a"))
    rollouts.handle([EngineJoined("b")])
    train(rollouts, backend, submitted(backend)["a"][:4])
    rollouts.update_weights(1)
    rollouts.handle(serving("a", version=1))
    # Those it was sent first, which are old by the time it has them.
    rollouts.handle(serving("b", version=0))
    assert list(submitted(backend)) == ["a"]
    assert controller.num_updates == 1
    rollouts.handle([*serving("b", version=1), EngineLost("a", "it died")])
    assert list(submitted(backend)) == ["b"]
    assert check_log(notes) == [2, 3, 4, 5]


def test_an_engine_that_was_lost_does_not_join_again():
    """Its messages may come in another order than they were sent."""
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend)
    rollouts.handle([EngineLost("b", "it died"), EngineJoined("b"), EngineJoined("c"), EngineJoined("c")])
    assert backend.taken("load") == [("load", "a", 0), ("load", "c", 0)]


def test_what_was_drawn_with_new_weights_is_used_once_they_are_proved():
    backend = Manual("a", "b")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a"))
    ids = submitted(backend)["a"]
    train(rollouts, backend, ids[:2])
    rollouts.update_weights(1)
    # The draw overtook the proof; the engine that says it first has proved nothing.
    rollouts.handle([backend.generated(id, version=1) for id in ids[2:]])
    assert notes.of("completed")[2:] == []
    rollouts.handle(serving("a", version=1))
    assert [(e["oldest_step"], e["newest_step"]) for e in notes.of("completed")[2:]] == [(1, 1), (1, 1)]
    assert check_log(notes) == [1, 2]


def test_what_an_engine_drew_without_proof_is_drawn_again_when_it_is_lost():
    backend = Manual("a", "b")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a"))
    ids = submitted(backend)["a"]
    train(rollouts, backend, ids[:2])
    rollouts.update_weights(1)
    rollouts.handle([backend.generated(id, version=1) for id in ids[2:]])
    rollouts.handle([EngineLost("a", "it does not hold version 1"), *serving("b", version=1)])
    assert len(submitted(backend)["b"]) == 4
    assert len(notes.of("completed")) == 2


def test_tokens_of_unknown_weights_end_the_run():
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend)
    rollouts.handle(serving("a"))
    with pytest.raises(GenerationFailed, match=r"version 5, which no weight update had"):
        rollouts.handle([backend.generated(submitted(backend)["a"][0], version=5)])


def test_a_step_that_was_left_out_sends_nothing():
    """The weights are those that every engine holds, so the weight update is in force at once."""
    backend = Manual("a", "b")
    rollouts, controller, notes = rollouts_over(backend)
    rollouts.handle(serving("a"))
    backend.commands = [command for command in backend.commands if command[0] != "load"]
    train(rollouts, backend, submitted(backend)["a"])
    rollouts.update_weights(0)
    assert backend.taken("load") == []
    assert controller.num_updates == 1
    # The one that had not proved them yet serves as well once it has.
    rollouts.handle([*serving("b"), EngineLost("a", "it died")])
    assert list(submitted(backend)) == ["a", "b"]
    assert [(e["engine"], e["step"]) for e in notes.of("weights_loaded")] == [("a", 0), ("a", 1), ("b", 1)]
    assert check_log(notes) == [2, 3]


def test_two_weight_updates_may_be_in_flight():
    backend = Manual("a", "b")
    rollouts, controller, notes = rollouts_over(backend, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a", "b"))
    ids = submitted(backend)
    train(rollouts, backend, ids["a"])
    rollouts.update_weights(1)
    train(rollouts, backend, ids["b"])
    rollouts.update_weights(2)
    rollouts.handle([*serving("a", version=2), *serving("b", version=1)])
    assert controller.num_updates == 1
    rollouts.handle(serving("b", version=2))
    assert controller.num_updates == 2
    assert check_log(notes) == [2]


@pytest.mark.world
@pytest.mark.parametrize(
    "late, reason",
    [("request", "a request took longer than 10 s"), ("load", "version 1 took longer than 4 s to load")],
)
def test_who_does_not_answer_in_time_is_given_up(late, reason):
    backend = Manual("a", "b")
    limits = {"request_s": 10.0} if late == "request" else {"load_s": 4.0}
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1, staleness=1, **limits)
    rollouts.handle(serving("a", "b"))
    ids = submitted(backend)
    if late == "load":
        train(rollouts, backend, ids["a"])
        rollouts.handle([backend.generated(id) for id in ids["b"]])
        backend.now_s = 50.0
        rollouts.update_weights(1)
        rollouts.handle(serving("b", version=1))
        expected_s = 54.0
    else:
        backend.now_s = 2.0
        rollouts.handle([backend.generated(id) for id in ids["b"]])
        expected_s = 10.0
    assert rollouts.patience_s(100.0) == expected_s - backend.now_s
    while not backend.events:
        rollouts.advance(100.0)
    assert backend.now_s == expected_s
    # It is stopped once, and lost when the backend reports that.
    rollouts.handle([])
    assert backend.taken("stop") == [("stop", "a", reason)]
    assert notes.of("engine_lost") == []
    rollouts.advance(100.0)
    # The loss may be reported twice.
    rollouts.handle([EngineLost("a", reason)])
    assert [(e["engine"], e["reason"]) for e in notes.of("engine_lost")] == [("a", reason)]
    if late == "draw":
        assert list(submitted(backend)) == ["b"]


def test_only_those_who_are_late_are_given_up():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, load_s=4.0, request_s=9.0)
    backend.now_s = 3.0
    rollouts.handle([EngineJoined("b")])
    backend.now_s = 5.0
    assert rollouts.patience_s(100.0) == 0.0
    rollouts.handle([])
    rollouts.handle(backend.poll())
    assert [event["engine"] for event in notes.of("engine_lost")] == ["a"]
    assert rollouts.patience_s(100.0) == 2.0
    rollouts.handle(serving("b"))
    assert len(submitted(backend)["b"]) == 4
    backend.now_s = 8.0
    rollouts.handle([])
    rollouts.handle(backend.poll())
    assert rollouts.patience_s(100.0) == 6.0
    assert len(notes.of("engine_lost")) == 1


def test_the_oldest_and_the_newest_token_of_a_draw_count():
    """Weights that came in flight: what is not proved is not used; the oldest token says how old it is."""
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a"))
    ids = submitted(backend)["a"]
    train(rollouts, backend, ids[:2])
    rollouts.update_weights(1)
    rollouts.handle([backend.generated(id, version=(0, 1)) for id in ids[2:]])
    assert len(notes.of("completed")) == 2
    rollouts.handle(serving("a", version=1))
    assert [(e["oldest_step"], e["newest_step"]) for e in notes.of("completed")[2:]] == [(0, 1), (0, 1)]
    rollouts.handle([backend.scored(command[1]) for command in backend.taken("score")])
    assert rollouts.take().taken.staleness == (1,)


def test_newer_weights_are_no_excuse_for_who_proves_none():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1, load_s=4.0)
    rollouts.handle([*serving("a"), EngineJoined("b"), EngineJoined("c")])
    for version, now_s in ((1, 3.0), (2, 5.0)):
        train(rollouts, backend, submitted(backend)["a"], version=version - 1)
        backend.now_s = now_s
        rollouts.update_weights(version)
        # Engine c is behind, but it gets on.
        rollouts.handle([*serving("a", version=version), *serving("c", version=version - 1)])
        rollouts.handle(backend.poll())
    assert [event["engine"] for event in notes.of("engine_lost")] == ["b"]
    backend.now_s = 8.5
    rollouts.handle([])
    rollouts.handle(backend.poll())
    assert len(notes.of("engine_lost")) == 1
    backend.now_s = 9.0
    rollouts.handle([])
    rollouts.handle(backend.poll())
    assert [event["engine"] for event in notes.of("engine_lost")] == ["b", "c"]


def test_weights_are_copied_at_the_update_even_without_engines():
    """By the time another engine joins, the trainer may be in the middle of a step."""
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend, staleness=1)
    rollouts.handle(serving("a"))
    train(rollouts, backend, submitted(backend)["a"][:4])
    rollouts.handle([EngineLost("a", "it died")])
    assert backend.updated == 0
    rollouts.update_weights(5)
    assert (backend.updated, backend.taken("load")) == (5, [("load", "a", 0)])
    rollouts.handle([EngineJoined("b")])
    assert backend.taken("load") == [("load", "b", 5)]


def wants(notes):
    return [(event["engines"], event["draining"], event["reason"]) for event in notes.of("scale")]


def test_an_engine_that_is_added_draws_and_one_that_leaves_hands_over_what_it_has():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, num_batches=4, groups_per_step=1, staleness=2)
    rollouts.handle(serving("a"))
    first = submitted(backend)["a"]
    rollouts.handle([ScaleRequest(2)])
    assert backend.taken("scale") == [("scale", 2)]
    rollouts.handle([EngineJoined("b"), *serving("b")])
    train(rollouts, backend, first[:2])
    rollouts.update_weights(1)
    rollouts.handle([*serving("a", version=1), *serving("b", version=1)])
    (ids,) = submitted(backend).values()
    assert rollouts.engines().activity == {"a": "generates 4 answers", "b": "generates 2 answers"}
    rollouts.handle([ScaleRequest(1)])
    # Who draws least leaves; the other one gets nothing before it was handed over.
    assert (backend.taken("abort"), backend.taken("retire")) == ([("abort", "b", ids)], [])
    assert rollouts.engines().activity["b"] == "draining, returns 2 answers"
    rollouts.handle([backend.generated(ids[0], version=1, reason="abort")])
    assert backend.taken("retire") == []
    (again,) = submitted(backend)["a"]
    assert backend.requests[again][1].partial_output.token_ids == (backend.requests[ids[0]][1].params.seed, 9)
    rollouts.handle([backend.generated(ids[1], version=1)])
    assert backend.taken("retire") == [("retire", "b")]
    rollouts.handle([EngineLost("b", DRAINED)])
    assert rollouts.engines().activity.keys() == {"a"}
    assert wants(notes) == [(2, [], ""), (1, ["b"], "")]
    assert [event["kind"] for event in notes.of("partial", "engine_lost")] == ["partial", "engine_lost"]
    assert check_log(notes) == [1, 2, 3]


def test_who_leaves_stays_where_another_one_is_lost():
    backend = Manual("a", "b")
    rollouts, _, notes = rollouts_over(backend)
    rollouts.handle(serving("a", "b"))
    ids = submitted(backend)
    rollouts.handle([ScaleRequest(1)])
    ((_, leaving, _),) = backend.taken("abort")
    other = "a" if leaving == "b" else "b"
    rollouts.handle([EngineLost(other, "it died")])
    assert list(submitted(backend)) == [leaving]
    rollouts.handle([backend.generated(id, reason="abort") for id in ids[leaving]])
    assert list(submitted(backend)) == [leaving]
    assert backend.taken("retire") == []
    assert wants(notes) == [(1, [leaving], ""), (1, [], "")]
    assert check_log(notes) == [0, 1]


def test_who_draws_nothing_leaves_first_and_the_newest_of_those():
    backend = Manual("a", "b")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a", "b"))
    (drawer,) = submitted(backend)
    rollouts.handle([EngineJoined("c"), EngineJoined("d"), *serving("c"), ScaleRequest(2)])
    assert backend.taken("retire") == [("retire", "d"), ("retire", "c")]
    assert backend.taken("abort") == []
    rollouts.handle([ScaleRequest(1)])
    (idle,) = {"a", "b"} - {drawer}
    assert backend.taken("retire") == [("retire", idle)]
    # It had started before anybody heard that it is too many.
    rollouts.handle([EngineJoined("e")])
    assert backend.taken("retire") == [("retire", "e")]
    assert wants(notes)[-1] == (1, sorted([idle, "c", "d", "e"], key="abcde".index), "")
    assert check_log(notes) == [0]


def test_what_cannot_be_had_is_told():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend)
    assert rollouts.engines() == Engines(0, {"a": "loads its first weights"})
    rollouts.handle([*serving("a"), ScaleRequest(3), ScaleRequest(1, "there is no room")])
    found = rollouts.engines()
    assert (found.target, found.reason) == (1, "there is no room")
    assert found.lines("r") == [
        "run r: target 1 engine, 1 alive",
        "  a: generates 4 answers",
        "  no more: there is no room",
    ]
    rollouts.handle([ScaleRequest(2, id="7")])
    assert rollouts.engines().lines("r")[2:] == ["  1 starting"]
    assert rollouts.engines().last_request == "7"
    assert wants(notes) == [(3, [], ""), (1, [], "there is no room"), (2, [], "")]


def test_nobody_with_older_weights_goes_on_from_what_was_handed_over():
    backend = Manual("a", "b")
    rollouts, _, notes = rollouts_over(backend, num_batches=4, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a", "b"))
    ids = submitted(backend)
    train(rollouts, backend, ids["a"])
    rollouts.update_weights(1)
    # While b draws, it gets the new weights before a does.
    rollouts.handle(serving("b", version=1))
    rollouts.pause()
    is_idle = [backend.generated(id, version=(0, 1), reason="abort") for id in ids["b"]]
    rollouts.handle([*is_idle, EngineLost("b", "it died")])
    rollouts.resume()
    assert submitted(backend) == {}
    rollouts.handle(serving("a", version=1))
    # Those two, and the group that the weight update made room for.
    assert [len(each) for each in submitted(backend).values()] == [4]
    assert check_log(notes) == [1, 2]
