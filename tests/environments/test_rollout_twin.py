"""Episodes of any number of turns, all at once, over exactly the tokens given and drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millrace.types import Completion, Prompt, SamplingParams
from tests.environments.rollout import rollout
from tests.training.pieces import completion


class Engine:
    """Draws two tokens that can be told apart, and remembers what it was asked."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[list[tuple[tuple[int, ...], int]]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        self.asked.append([(tuple(p), w.seed) for p, w in zip(prompts, params, strict=True)])
        return [
            completion(1000 + wanted.seed, len(given)) for given, wanted in zip(prompts, params, strict=True)
        ]


class Rounds:
    """As many turns as the prompt's first token says; what is drawn is answered with itself plus 5000."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._left = prompt.token_ids[0]

    def observe(self) -> tuple[int, ...]:
        return self._prompt.token_ids

    def step(self, drawn: Completion) -> tuple[int, ...] | None:
        self._left -= 1
        return (drawn.token_ids[0] + 5000,) if self._left else None


def params(prompt: int, sample: int, turn: int) -> SamplingParams:
    return SamplingParams(seed=100 * prompt + 10 * sample + turn)


def prompts(*rounds: int) -> list[Prompt]:
    return [Prompt(f"train:{i}", (n, 50 + i), f"prompt {i}") for i, n in enumerate(rounds)]


def play(*rounds: int, num_samples: int = 2):
    engine = Engine()
    return engine, rollout(prompts(*rounds), Rounds, engine, params, num_samples=num_samples)


def test_the_context_of_a_turn_is_exactly_what_was_given_and_drawn():
    engine, (group,) = play(2, num_samples=1)
    first, second = engine.asked
    assert first == [((2, 50), 0)]
    # The observation, the two tokens drawn, and what the environment answered.
    assert second == [((2, 50, 1000, 2, 6000), 1)]
    (trajectory,) = group.trajectories
    assert [turn.observation for turn in trajectory.turns] == [(2, 50), (6000,)]
    assert [turn.completion.token_ids for turn in trajectory.turns] == [(1000, 2), (1001, 5)]
    assert (trajectory.num_tokens, trajectory.num_actions, trajectory.outcome) == (7, 4, None)


def test_every_turn_of_every_sample_has_a_seed_of_its_own():
    engine, _ = play(2, 2)
    assert [[seed for _, seed in asked] for asked in engine.asked] == [[0, 10, 100, 110], [1, 11, 101, 111]]


def test_episodes_of_different_lengths_keep_their_order():
    engine, groups = play(1, 3, 2)
    assert [group.prompt.id for group in groups] == ["train:0", "train:1", "train:2"]
    assert [[len(t.turns) for t in group.trajectories] for group in groups] == [[1, 1], [3, 3], [2, 2]]
    # Those that are over are asked no more; one call a turn for all others.
    assert [len(asked) for asked in engine.asked] == [6, 4, 2]
    drawn = [
        turn.completion.token_ids[0] - 1000
        for group in groups
        for trajectory in group.trajectories
        for turn in trajectory.turns
    ]
    assert drawn == [0, 10, 100, 101, 102, 110, 111, 112, 200, 201, 210, 211]


def test_a_single_turn_is_one_call():
    engine = Engine()
    groups = rollout(prompts(1, 1), Rounds, engine, params, num_samples=3)
    assert len(engine.asked) == 1
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert all(len(trajectory.turns) == 1 for group in groups for trajectory in group.trajectories)


def test_an_engine_that_forgets_a_request_is_not_passed_over():
    class Forgetful(Engine):
        def generate(self, prompts, params):
            return super().generate(prompts, params)[:-1]

    with pytest.raises(ValueError, match="zip"):
        rollout(prompts(1, 1), Rounds, Forgetful(), params, num_samples=1)
