"""What engines hand over for a checkpoint, and who goes on with it."""

from __future__ import annotations

import json

from millrace.eventlog.log import check_log
from millrace.rollout.backend import EngineLost
from tests.rollout.manual import Manual, Notes, rollouts_over, serving, worth
from tests.rollout.test_manager import ThreeTurns, draw_all


def test_what_engines_hand_over_is_saved_and_goes_on():
    runtime = Manual("a")
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1, environment=ThreeTurns)
    rollouts.handle(serving("a"))
    first, second = (id for order in runtime.taken("submit") for id in order[2])
    rollouts.handle([runtime.drawn(first)])
    (third,) = (id for order in runtime.taken("submit") for id in order[2])
    rollouts.hold()
    assert runtime.taken("abort") == [("abort", "a", [second, third])]
    assert not rollouts.handed_over
    rollouts.handle([runtime.drawn(second, reason="abort", version=(0, 0)), runtime.drawn(third)])
    assert rollouts.handed_over
    assert runtime.taken("submit") == []
    words, columns = rollouts.state()
    assert (words["versions"], words["births"]) == ({"0": 0}, [[0, [0, None]]])
    rollouts.release()
    sent = {id: runtime.draws[id][1] for order in runtime.taken("submit") for id in order[2]}
    assert sorted(len(draw.prompt) for draw in sent.values()) == [2, 10]
    # The one that was aborted goes on; the other one is at its third turn.
    assert [draw.drawn is not None for draw in sent.values()] == [True, False]
    kept = Notes(notes)

    runtime = Manual("b")
    again, _, notes = rollouts_over(
        runtime, groups_per_step=1, environment=ThreeTurns, begin=None, notes=kept
    )
    again.load_state(json.loads(json.dumps(words)), columns)
    assert again.state()[0] == words
    again.begin(0)
    assert notes.of("keep") == [{"kind": "keep", "number": 0, "turns": [2, 0], "tokens": [0, 2]}]
    again.handle(serving("b"))
    resent = {id: runtime.draws[id][1] for order in runtime.taken("submit") for id in order[2]}
    assert [id.rsplit(".", 1)[0] for id in sorted(resent)] == ["0.0", "0.1"]
    for mine in resent.values():
        (theirs,) = (draw for draw in sent.values() if draw.params == mine.params)
        assert mine.prompt == theirs.prompt
        assert (mine.drawn is None) == (theirs.drawn is None)
    again.handle([runtime.drawn(id) for id in resent])
    draw_all(again, runtime)
    (group,) = again.take().groups
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [3, 3]
    assert check_log(notes) == []


def test_a_group_that_was_only_to_be_judged_is_judged_at_once():
    runtime = Manual("a")
    rollouts, _, notes = rollouts_over(runtime, groups_per_step=1)
    rollouts.handle(serving("a"))
    rollouts.handle([runtime.drawn(id) for order in runtime.taken("submit") for id in order[2]])
    words, columns = rollouts.state()
    runtime = Manual("b")
    again, _, _ = rollouts_over(runtime, groups_per_step=1, begin=None, notes=Notes(notes))
    again.load_state(words, columns)
    again.begin(0)
    ((_, call, texts),) = runtime.taken("judge")
    assert len(texts) == 2
    again.handle([runtime.judged(call)])
    assert [t.outcome.value for t in again.take().groups[0].trajectories] == [worth(text) for text in texts]


def test_an_engine_that_dies_takes_nothing_that_was_handed_over():
    runtime = Manual("a", "b")
    rollouts, _, _ = rollouts_over(runtime, groups_per_step=1)
    rollouts.handle(serving("a", "b"))
    ((_, engine, (first, second)),) = runtime.taken("submit")
    rollouts.hold()
    rollouts.handle([runtime.drawn(first, reason="abort"), EngineLost(engine, "it died")])
    assert rollouts.handed_over
    rollouts.release()
    orders = runtime.taken("submit")
    assert {name for _, name, _ in orders} == {"a", "b"} - {engine}
    drawn = [runtime.draws[id][1].drawn for order in orders for id in order[2]]
    assert sorted(0 if one is None else len(one.token_ids) for one in drawn) == [0, 2]
