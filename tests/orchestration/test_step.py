"""The first half of a batch: sampling, scoring, refilling, greedy baselines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from millrace.config.settings import RolloutConfig
from millrace.data.prompts import PromptStream
from millrace.observability.metrics import Spans
from millrace.orchestration.methods import build_method
from millrace.orchestration.step import (
    Sampled,
    completion_seed,
    greedy,
    is_equal,
    sample_and_score,
    sample_batch,
    sampling,
)
from millrace.types import Outcome, Prompt, SamplingParams
from tests.orchestration.pieces import parts, recipe, scored
from tests.training.pieces import completion


def test_every_completion_has_a_seed_of_its_own_place():
    class Engine:
        version = 0

        def generate(self, prompts, params):
            self.seeds = [wanted.seed for wanted in params]
            return [replace(completion(7), text=f"answer {number}") for number in range(len(prompts))]

    class Reward:
        def score(self, prompts, completions):
            return [Outcome("score", float(number)) for number in range(len(prompts))]

    engine = Engine()
    prompts = [Prompt("train:3", (1,), ""), Prompt("train:9", (2,), "")]

    def seeds(seed: tuple[int, int]) -> list[int]:
        groups = sample_and_score(
            parts(engine=engine, reward=Reward()),
            prompts,
            SamplingParams(max_tokens=5),
            num_samples=2,
            seed=seed,
            spans=Spans(),
        )
        rewards = [t.outcome.value for group in groups for t in group.trajectories]
        assert ([group.prompt.id for group in groups], rewards) == (["train:3", "train:9"], [0, 1, 2, 3])
        return engine.seeds

    first = seeds((7, 0))
    assert first == [completion_seed(7, 0, p, s, 0) for p in (0, 1) for s in (0, 1)]
    assert seeds((7, 0)) == first
    assert len({*first, *seeds((7, 1)), *seeds((8, 0)), *seeds((0, 7))}) == 16


def test_what_is_said_twice_to_one_prompt_is_judged_once():
    said = ["a", "a", "b", "a", "c", "c"]

    class Engine:
        version = 0

        def generate(self, prompts, params):
            return [replace(completion(7), text=text) for text in said]

    class Reward:
        def score(self, prompts, completions):
            self.asked = [(prompt.id, text) for prompt, text in zip(prompts, completions, strict=True)]
            return [Outcome("score", float(number)) for number in range(len(prompts))]

    reward = Reward()
    prompts = [Prompt("train:3", (1,), ""), Prompt("train:9", (2,), "")]
    groups = sample_and_score(
        parts(engine=Engine(), reward=reward),
        prompts,
        SamplingParams(max_tokens=5),
        num_samples=3,
        seed=(0, 0),
        spans=Spans(),
    )
    # The same text to another prompt is another answer.
    assert reward.asked == [("train:3", "a"), ("train:3", "b"), ("train:9", "a"), ("train:9", "c")]
    assert [[t.outcome.value for t in group.trajectories] for group in groups] == [[0, 0, 1], [2, 3, 3]]


def test_a_seed_is_64_bits_of_all_its_parts():
    seeds = {completion_seed(a, b) for a in range(60) for b in range(60)}
    assert len(seeds) == 3600
    assert 2**63 < max(seeds) < 2**64
    assert completion_seed(1, 11) != completion_seed(11, 1)
    # Written down, because a resumed run of another version must draw the same tokens.
    assert completion_seed(0, 0, 0, 0, 0) == 12532686007686991089


def test_evaluation_is_greedy_and_training_samples():
    config = RolloutConfig(max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, stop=("\n",))
    assert sampling(config, (0, 2)) == SamplingParams(9, 0.7, 5, 0.9, (0, 2), ("\n",), 0)
    assert greedy(config, (0, 2)) == SamplingParams(9, 0.0, 0, 1.0, (0, 2), ("\n",), 0)


class Echo:
    """Says its own seed and how it was drawn, so that a reward can tell samples and rounds apart."""

    version = 0

    def __init__(self):
        self.asked = []

    def generate(self, prompts, params):
        self.asked.append(
            [(prompt[0], wanted.temperature) for prompt, wanted in zip(prompts, params, strict=True)]
        )
        return [
            replace(
                completion(*([7] * (2 if wanted.temperature else 3))),
                text=f"{wanted.temperature} {wanted.seed}",
            )
            for wanted in params
        ]


class Table:
    """The n-th sample of a prompt in a call earns the n-th reward of its row; None fails."""

    def __init__(self, rows, greedy=None):
        self.rows, self.greedy = rows, greedy or {}

    def score(self, prompts, completions):
        seen: dict[str, int] = {}
        outcomes = []
        for prompt, text in zip(prompts, completions, strict=True):
            number = seen[prompt.id] = seen.get(prompt.id, -1) + 1
            is_greedy = text.startswith("0.0 ")
            value = self.greedy[prompt.id] if is_greedy else self.rows[prompt.id][number]
            outcomes.append(Outcome.failure("it hung") if value is None else Outcome("score", value))
        return outcomes


def prompts(num: int) -> list[Prompt]:
    return [Prompt(f"p{n}", (n + 1,), f"prompt {n}") for n in range(num)]


def sampled(rows: dict, *, rounds: int = 0, step: int = 4, greedy=None, **sections):
    """A batch of three prompts with two samples each, out of eight prompts in order."""
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 2, "refill_rounds": rounds}
    config = recipe(rollout=rollout, seed=11, **sections)
    engine, stream = Echo(), PromptStream(prompts(8), seed=0, shuffle=False)
    given = parts(engine=engine, reward=Table(rows, greedy), method=build_method(config))
    batch = sample_batch(given, stream, config, step=step, spans=Spans())
    following = stream.next(1)[0].id
    return batch, engine, following


DIFFERENT, EQUAL, FAILED, LONE = [1.0, 0.0], [2.0, 2.0], [None, None], [3.0, None]


def seeds_of(batch) -> dict[str, list[int]]:
    return {group.prompt.id: [int(t.text.split()[1]) for t in group.trajectories] for group in batch.groups}


def test_without_refilling_every_group_is_kept_whatever_its_rewards():
    batch, engine, following = sampled({"p0": EQUAL, "p1": DIFFERENT, "p2": FAILED})
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1", "p2"]
    assert (batch.left_out, batch.num_rounds, batch.baselines) == (frozenset(), 0, None)
    assert batch.num_greedy_tokens == Sampled([]).num_rounds == 0
    assert (len(engine.asked), following) == (1, "p3")
    # Written down, because a resumed run of another version must draw the same tokens.
    assert seeds_of(batch)["p1"] == [completion_seed(11, 4, 1, 0, 0), completion_seed(11, 4, 1, 1, 0)]


def test_new_prompts_replace_groups_of_equal_reward_and_of_one_reward_and_of_none():
    rows = {"p0": EQUAL, "p1": DIFFERENT, "p2": FAILED, "p3": LONE, "p4": DIFFERENT, "p5": DIFFERENT}
    batch, engine, following = sampled(rows, rounds=5)
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert sorted(batch.left_out) == [0, 2, 3]
    # Three prompts, two for the two that taught nothing, one for the one of those that did not either.
    assert [len(asked) for asked in engine.asked] == [6, 4, 2]
    assert (batch.num_rounds, following) == (2, "p6")


def test_every_round_has_seeds_of_its_own():
    rows = {"p0": EQUAL, "p1": EQUAL, "p2": EQUAL, "p3": EQUAL, "p4": EQUAL, "p5": EQUAL}
    batch, _, _ = sampled(rows, rounds=1)
    found = seeds_of(batch)
    assert found["p0"] == [completion_seed(11, 4, 0, 0, 0), completion_seed(11, 4, 0, 1, 0)]
    assert found["p3"] == [completion_seed(11, 4, 1, 0, 0, 0), completion_seed(11, 4, 1, 0, 1, 0)]
    assert len({seed for pair in found.values() for seed in pair}) == 12
    other, _, _ = sampled(rows, rounds=1, step=5)
    assert not {*sum(seeds_of(other).values(), [])} & {*sum(found.values(), [])}


def test_nothing_is_refilled_where_nothing_is_missing():
    batch, engine, following = sampled({"p0": DIFFERENT, "p1": DIFFERENT, "p2": DIFFERENT}, rounds=5)
    assert (batch.left_out, batch.num_rounds, len(engine.asked), following) == (frozenset(), 0, 1, "p3")


@pytest.mark.parametrize("rounds", [1, 2])
def test_when_its_rounds_are_done_a_batch_is_smaller(rounds):
    rows = {f"p{n}": EQUAL for n in range(8)} | {"p1": DIFFERENT}
    batch, engine, following = sampled(rows, rounds=rounds)
    assert len(batch.groups) == 3 + 2 * rounds
    assert set(range(3 + 2 * rounds)) - batch.left_out == {1}
    assert (batch.num_rounds, len(engine.asked), following) == (rounds, 1 + rounds, f"p{3 + 2 * rounds}")


def test_where_no_group_teaches_every_one_is_left_out():
    batch, _, following = sampled({f"p{n}": EQUAL for n in range(8)}, rounds=1)
    assert (batch.left_out, following) == (frozenset(range(6)), "p6")


REMAX = {"advantage": {"kind": "greedy_baseline"}}


def test_greedy_answers_are_sampled_and_scored_once_for_each_prompt():
    rows = {"p0": DIFFERENT, "p1": EQUAL, "p2": DIFFERENT}
    greedy_rows = {"p0": 0.25, "p1": None, "p2": -1.0}
    batch, engine, _ = sampled(rows, greedy=greedy_rows, **REMAX)
    assert batch.baselines[0] == 0.25 and math.isnan(batch.baselines[1]) and batch.baselines[2] == -1.0
    assert engine.asked[1] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert {temperature for _, temperature in engine.asked[0]} == {1.0}
    # Three tokens each, as the engine of this test says them.
    assert batch.num_greedy_tokens == 9
    assert batch.left_out == frozenset()


def test_baselines_belong_to_the_groups_of_every_round():
    rows = {"p0": EQUAL, "p1": DIFFERENT, "p2": DIFFERENT, "p3": DIFFERENT}
    batch, engine, _ = sampled(rows, rounds=3, greedy={"p0": 1.0, "p1": 2.0, "p2": 3.0, "p3": 4.0}, **REMAX)
    assert batch.baselines == [1.0, 2.0, 3.0, 4.0]
    assert sorted(batch.left_out) == [0]


def test_a_group_is_equal_where_fewer_than_two_rewards_differ():
    groups = scored([1.0, 0.0], [2.0, 2.0], [None, None], [3.0, None], [3.0, None, 3.0], [3.0, None, 4.0])
    assert [is_equal(group) for group in groups] == [False, True, True, True, True, False]
