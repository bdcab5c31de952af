"""Held-out accuracy, and the rows of tables."""

from __future__ import annotations

import math

import pytest

from millrace.rollout.episodes import view_answer
from millrace.rollout.sampled_batch import completion_seed
from millrace.run.evaluation import evaluate, is_right, rollout_rows, summarise
from millrace.run.health.health_checks import RunStopped, check_evaluation
from millrace.types import Completion, Group, Outcome, Prompt, SamplingParams, Trajectory, Turn
from tests.close import close_fp64
from tests.training.pieces import completion, prompt, trajectory


def summary(*outcomes: Outcome, full_marks: float = 1.0):
    count = len(outcomes)
    trajectories = [
        Trajectory((Turn((1,), completion(*range(1, 2 + i))),), outcome) for i, outcome in enumerate(outcomes)
    ]
    return summarise([prompt()] * count, trajectories, full_marks=full_marks)


def score(value: float) -> Outcome:
    return Outcome("score", value)


def test_a_failed_reward_is_not_a_zero():
    found = summary(score(1.0), Outcome.failure("it hung"), score(0.0), score(1.0))
    close_fp64([found.accuracy, found.reward, found.failed], [2 / 3, 2 / 3, 1 / 4])
    # Length is of every answer: 1, 2, 3 and 4 tokens.
    assert found.length == 2.5


def test_right_is_full_marks_and_nothing_less():
    found = summary(score(1.2), score(1.0), score(1.1), full_marks=1.2)
    close_fp64([found.accuracy, found.reward], [1 / 3, 3.3 / 3])
    assert is_right(score(0.1 + 0.2), 0.3)
    assert is_right(score(0.3), 0.1 + 0.2)
    assert not is_right(score(0.29999), 0.3)
    assert not is_right(Outcome("invalid", 1.0), 1.0)
    assert not is_right(Outcome.failure("it hung"), 0.0)


def test_each_of_several_rewards_has_its_own_mean_and_what_failed_of_it_is_in_none():
    def combined(kind: str, near: float, exact: float) -> Outcome:
        return Outcome(kind, near + exact, "", {"near": near, "exact": exact})

    nan = math.nan
    outcomes = [combined("score", 0.25, 0.0), combined("failed", nan, 1.0), combined("failed", nan, nan)]
    outcomes += [combined("invalid", 0.75, 0.0), Outcome.failure("the engine is gone")]
    found = summary(*outcomes)
    expected = {"reward/near/mean": 0.5, "reward/exact/mean": 1 / 3}
    close_fp64([found.metrics[name] for name in expected], list(expected.values()))
    close_fp64(
        [found.metrics[f"reward/{name}/failed_fraction"] for name in ("near", "exact")], [3 / 5, 2 / 5]
    )
    close_fp64([found.metrics["reward/mean"], found.failed], [0.5, 3 / 5])
    assert found.rows[0]["reward/near"] == 0.25 and math.isnan(found.rows[4]["reward/near"])
    # Of one reward there is nothing more to say.
    assert summary(Outcome("score", 1.0, "", {"exact": 1.0})).parts == {}


def test_rows_say_what_was_asked_and_answered():
    (row,) = summary(score(1.0)).rows
    assert row == {
        "prompt_id": "train:0",
        "prompt": "the prompt",
        "completion": "text",
        "answer": "",
        "reward": 1.0,
        "outcome": "score",
        "reason": "",
        "right": True,
        "num_tokens": 1,
        "finish_reason": "stop",
    }


def test_without_prompts_there_is_nothing_to_evaluate():
    with pytest.raises(ValueError, match="there are no prompts to evaluate on"):
        summary()


def test_every_prompt_is_answered_with_the_same_parameters_and_its_text_is_scored():
    class Engine:
        version = 0

        def generate(self, prompts, params):
            self.asked = (prompts, params)
            lengths = [len(tokens) for tokens in prompts]
            return [Completion((7,) * n, [0.0] * n, [0] * n, "length", f"text {n}") for n in lengths]

    class Reward:
        def score(self, prompts, completions, episodes=()):
            self.seen = list(zip([p.id for p in prompts], completions, strict=True))
            return [score(1.0), score(0.0)]

    engine, reward = Engine(), Reward()
    prompts = [Prompt("eval:0", (1, 2), ""), Prompt("eval:1", (3,), "")]
    params = SamplingParams(temperature=0.0)
    found = evaluate(engine, reward, prompts, params, full_marks=1.0)
    assert engine.asked == ([(1, 2), (3,)], [params, params])
    # What is drawn has a seed of its own, the same each time.
    for _ in range(2):
        evaluate(engine, reward, prompts, SamplingParams(temperature=1.0, seed=5), full_marks=1.0)
        drawn = [each.seed for each in engine.asked[1]]
        assert drawn == [completion_seed(5, 0), completion_seed(5, 1)]
    assert reward.seen == [("eval:0", "text 2"), ("eval:1", "text 1")]
    assert (found.accuracy, found.truncated, found.length) == (0.5, 1.0, 1.5)


def test_a_reward_that_sees_episodes_gets_those_of_an_evaluation():
    class Engine:
        version = 0

        def generate(self, prompts, params):
            return [completion(2, 3) for _ in prompts]

    class Reward:
        def score(self, prompts, completions, episodes):
            self.seen = episodes
            return [Outcome("score", 1.0, extras={"grade/note": "good"})]

    reward, prompts = Reward(), [Prompt("eval:0", (1, 2), "1+1=")]
    found = evaluate(Engine(), reward, prompts, SamplingParams(), full_marks=1.0, view_episode=view_answer)
    (episode,) = reward.seen
    assert [(turn.observation, turn.observation_tokens) for turn in episode.turns] == [("1+1=", 2)]
    assert found.rows[0]["reward/grade/note"] == "good"


def test_rollout_rows_give_each_trajectory_its_own_advantage_and_none_to_a_failure():
    outcomes = [score(1.0), Outcome.failure("it hung"), score(0.0)]
    made = [trajectory((1,), (2, 3), logprobs=[-0.5, -0.25], version=6).scored(o) for o in outcomes]
    rows = rollout_rows(9, [Group(prompt(), tuple(made))], [0.5, -0.5])
    assert [row["sample"] for row in rows] == [0, 1, 2]
    assert (rows[0]["advantage"], rows[2]["advantage"]) == (0.5, -0.5)
    assert math.isnan(rows[1]["advantage"]) and math.isnan(rows[1]["reward"])
    assert (rows[1]["outcome"], rows[1]["reason"]) == ("failed", "it hung")
    assert [rows[0][key] for key in ("step", "version", "token_ids", "num_tokens")] == [9, 6, [2, 3], 2]
    # In the sampler's own dtype, which a table keeps.
    assert rows[0]["logprobs"] is made[0].turns[-1].completion.logprobs


def test_an_evaluation_without_a_score_stops_instead_of_reading_as_zero():
    result = summary(Outcome.failure("it hung"))
    with pytest.raises(RunStopped) as caught:
        check_evaluation(result, limit=1.0)
    assert str(caught.value).startswith("100% of the rewards of the held-out answers failed, ")
    assert str(caught.value).endswith("; the first: it hung")


def test_a_row_names_the_weights_of_its_oldest_and_of_its_last_token():
    first = completion(2, 3, version=4)
    first.versions[1] = 6
    turns = (Turn((1,), first), Turn((5,), completion(7, version=8)))
    (row,) = rollout_rows(1, [Group(prompt(), (Trajectory(turns, score(1.0)),))], [0.0])
    assert (row["oldest_version"], row["version"]) == (4, 8)


def test_an_episode_earns_its_turn_rewards_too() -> None:
    turns = [Turn((1,), completion(2), reward=0.25), Turn((3,), completion(4), reward=0.5)]
    found = summarise([prompt()], [Trajectory(tuple(turns), Outcome("score", 0.25), "done")], full_marks=1.0)
    assert (found.reward, found.accuracy, found.rows[0]["reward"]) == (1.0, 1.0, 1.0)
    assert found.metrics["episode/turns_mean"] == 2
