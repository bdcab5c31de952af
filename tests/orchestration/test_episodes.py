"""Episodes: the context of a turn is exactly the tokens so far."""

from __future__ import annotations

from millrace.orchestration.episodes import Playing
from millrace.types import Outcome
from tests.orchestration.manual import PROMPTS, completion


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
    playing = Playing.begin(7, PROMPTS["p1"], Echo, 2)
    first, second = playing.samples
    assert (first.number, first.place, second.place, playing.num_open) == (7, 0, 1, 2)
    assert first.context == first.observation == (101, 5)
    assert not first.play(drawn(30, "one"))
    assert first.context == (101, 5, 30, 9, 30, 30)
    assert second.context == (101, 5)
    assert first.play(drawn(40, "two"))
    assert [turn.observation for turn in first.turns] == [(101, 5), (30, 30)]
    assert first.said == "two"
    assert not second.play(drawn(50, "three"))
    assert second.play(drawn(60, "four"))
    group = playing.scored({"two": Outcome("score", 2.0), "four": Outcome("score", 4.0)})
    assert group.prompt is PROMPTS["p1"]
    assert [t.outcome.value for t in group.trajectories] == [2.0, 4.0]
    assert [[turn.completion.token_ids[0] for turn in t.turns] for t in group.trajectories] == [
        [30, 40],
        [50, 60],
    ]
