"""What engines hand over for a checkpoint, and who goes on with it."""

from __future__ import annotations

import json

from millrace.eventlog.log import check_log
from millrace.rollout.backend import EngineLost
from tests.rollout.manual import Manual, Notes, rollouts_over, serving, worth
from tests.rollout.test_manager import draw_all, three_turns


def test_what_engines_hand_over_is_saved_and_goes_on():
    backend = Manual("a", environment=three_turns)
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a"))
    first, second = (id for command in backend.taken("submit") for id in command[2])
    rollouts.handle([backend.generated(first)])
    (third,) = (id for command in backend.taken("submit") for id in command[2])
    rollouts.pause()
    assert backend.taken("abort") == [("abort", "a", [second, third])]
    assert not rollouts.is_idle
    rollouts.handle([backend.generated(second, reason="abort", version=(0, 0)), backend.generated(third)])
    assert rollouts.is_idle
    assert backend.taken("submit") == []
    state, columns = rollouts.state()
    assert (state["steps"], state["progress"]) == (
        {"0": 0},
        [[0, [[0, 0, False, 0.0, None], [None, 0, False, 0.0, None]]]],
    )
    rollouts.resume()
    sent = {id: backend.requests[id][1] for command in backend.taken("submit") for id in command[2]}
    assert sorted(len(request.prompt) for request in sent.values()) == [2, 10]
    # The one that was aborted goes on; the other one is at its third turn.
    assert [request.partial_output is not None for request in sent.values()] == [True, False]
    kept = Notes(notes)

    backend = Manual("b", environment=three_turns)
    again, _, notes = rollouts_over(backend, groups_per_step=1, begin=None, notes=kept)
    again.load_state(json.loads(json.dumps(state)), columns)
    assert again.state()[0] == state
    again.begin(0)
    assert notes.of("restored") == [{"kind": "restored", "number": 0, "turns": [2, 0], "tokens": [0, 2]}]
    again.handle(serving("b"))
    resent = {id: backend.requests[id][1] for command in backend.taken("submit") for id in command[2]}
    assert [id.rsplit(".", 1)[0] for id in sorted(resent)] == ["0.0", "0.1"]
    for mine in resent.values():
        (theirs,) = (request for request in sent.values() if request.params == mine.params)
        assert mine.prompt == theirs.prompt
        assert (mine.partial_output is None) == (theirs.partial_output is None)
    again.handle([backend.generated(id) for id in resent])
    draw_all(again, backend)
    (group,) = again.take().groups
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [3, 3]
    assert check_log(notes) == []


def test_a_group_that_was_only_to_be_judged_is_judged_at_once():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a"))
    rollouts.handle([backend.generated(id) for command in backend.taken("submit") for id in command[2]])
    state, columns = rollouts.state()
    backend = Manual("b")
    again, _, _ = rollouts_over(backend, groups_per_step=1, begin=None, notes=Notes(notes))
    again.load_state(state, columns)
    again.begin(0)
    ((_, call, texts),) = backend.taken("score")
    assert len(texts) == 2
    again.handle([backend.scored(call)])
    assert [t.outcome.value for t in again.take().groups[0].trajectories] == [worth(text) for text in texts]


def test_an_engine_that_dies_takes_nothing_that_was_handed_over():
    backend = Manual("a", "b")
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a", "b"))
    ((_, engine, (first, second)),) = backend.taken("submit")
    rollouts.pause()
    rollouts.handle([backend.generated(first, reason="abort"), EngineLost(engine, "it died")])
    assert rollouts.is_idle
    rollouts.resume()
    commands = backend.taken("submit")
    assert {name for _, name, _ in commands} == {"a", "b"} - {engine}
    generated = [backend.requests[id][1].partial_output for command in commands for id in command[2]]
    assert sorted(0 if one is None else len(one.token_ids) for one in generated) == [0, 2]
