"""Episodes: the context of a turn is exactly the tokens so far."""

from __future__ import annotations

from dataclasses import replace

from millrace.rollout.episodes import RunningGroup
from millrace.types import Outcome
from tests.rollout.manual import PROMPTS, completion


class Echo:
    """Two turns; between them it says the first token twice."""

    def __init__(self, prompt):
        self.prompt, self.turn = prompt, 0

    def observe(self):
        return self.prompt.token_ids

    def step(self, drawn):
        self.turn += 1
        return drawn.token_ids[:1] * 2 if self.turn == 1 else None


def drawn(seed, text):
    class Draw:
        class params:
            pass

    Draw.params.seed = seed
    return completion(Draw, text=text)


def test_a_context_is_what_was_given_and_drawn():
    running = RunningGroup.begin(7, PROMPTS["p1"], Echo, 2)
    first, second = running.samples
    assert (first.number, first.place, second.place, running.num_running) == (7, 0, 1, 2)
    assert first.context == first.observation == (101, 5)
    assert not first.finish_turn(drawn(30, "one"))
    assert first.context == (101, 5, 30, 9, 30, 30)
    assert second.context == (101, 5)
    assert first.finish_turn(drawn(40, "two"))
    assert [turn.observation for turn in first.turns] == [(101, 5), (30, 30)]
    assert first.answer == "two"
    assert not second.finish_turn(drawn(50, "three"))
    assert second.finish_turn(drawn(60, "four"))
    group = running.scored({"two": Outcome("score", 2.0), "four": Outcome("score", 4.0)})
    assert group.prompt is PROMPTS["p1"]
    assert [t.outcome.value for t in group.trajectories] == [2.0, 4.0]
    assert [[turn.completion.token_ids[0] for turn in t.turns] for t in group.trajectories] == [
        [30, 40],
        [50, 60],
    ]


def test_a_sample_goes_on_where_it_was():
    running = RunningGroup.begin(7, PROMPTS["p1"], Echo, 4)
    first, second, third, _ = running.samples
    first.finish_turn(drawn(30, "one"))
    first.finish_turn(drawn(40, "two"))
    second.finish_turn(drawn(50, "three"))
    second.partial_output = replace(drawn(60, "fo"), finish_reason="abort")
    third.partial_output = replace(drawn(70, ""), finish_reason="abort")
    before = running.so_far

    again = RunningGroup.begin(7, PROMPTS["p1"], Echo, 4, before)
    assert again.num_running == 3
    for old, new in zip(running.samples, again.samples, strict=True):
        assert (new.context, new.observation, new.done) == (old.context, old.observation, old.done)
        assert new.partial_output is old.partial_output
        assert [turn.completion for turn in new.turns] == [turn.completion for turn in old.turns]
    # The same episode goes on, not only its record.
    assert again.samples[1].finish_turn(drawn(60, "four"))
    assert again.samples[1].partial_output is None
    assert [t.completion.token_ids[0] for t in again.samples[1].turns] == [50, 60]
    assert not again.samples[3].finish_turn(drawn(80, "five"))


def test_an_episode_that_says_something_else_begins_anew():
    class Late(Echo):
        """It has learnt another answer since."""

        def step(self, drawn):
            found = super().step(drawn)
            return None if found is None else (1, 2, 3)

    class Short(Echo):
        """It has one turn now."""

        def step(self, drawn):
            return None

    running = RunningGroup.begin(7, PROMPTS["p1"], Echo, 2)
    running.samples[0].finish_turn(drawn(30, "one"))
    running.samples[0].finish_turn(drawn(40, "two"))
    running.samples[1].finish_turn(drawn(50, "three"))
    before = running.so_far
    late = RunningGroup.begin(7, PROMPTS["p1"], Late, 2, before)
    # What the second one said is not answered yet, and what it was told then is not compared.
    assert [len(sample.turns) for sample in late.samples] == [0, 1]
    assert late.num_running == 2
    assert late.samples[0].context == (101, 5)
    short = RunningGroup.begin(7, PROMPTS["p1"], Short, 2, before)
    assert [(len(sample.turns), sample.done) for sample in short.samples] == [(0, False), (1, True)]
    assert short.num_running == 1
