"""How a batch is sampled, and which groups teach nothing."""

from __future__ import annotations

import math
from dataclasses import replace

from millrace.config.rollout_section import RolloutConfig
from millrace.rollout.sampled_batch import (
    completion_seed,
    episode_metrics,
    extra_columns,
    extra_defaults,
    greedy,
    group_rewards,
    is_equal,
    part_metrics,
    sampling,
    source_metrics,
)
from millrace.types import Group, Outcome, Prompt, SamplingParams
from tests.run.pieces import scored


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


def test_the_rewards_of_a_group_are_returns_of_episodes():
    (group,) = scored([1.0, 0.5, None])
    first, *others = group.trajectories
    paid = replace(first, turns=tuple(replace(turn, reward=-0.5) for turn in first.turns))
    made = Group(group.prompt, (paid, *others))
    assert group_rewards(made) == [0.5, 0.5]
    assert is_equal(made) and not is_equal(group)


def test_numbers_beside_a_score_are_metrics_and_all_of_them_columns():
    outcomes = [
        Outcome("score", 1.0, parts={"a": 1.0}, extras={"a/steps": 2.0, "a/note": "x", "a/odd": 1.0}),
        Outcome("score", 0.0, parts={"a": 0.0}, extras={"a/steps": 4.0, "a/odd": "text"}),
        Outcome.failure("gone"),
    ]
    assert part_metrics(outcomes) == {"reward/a/steps": 3.0}
    defaults = extra_defaults(outcomes)
    rows = [extra_columns(outcome, defaults) for outcome in outcomes]
    assert [row["reward/a/note"] for row in rows] == ["x", "", ""]
    assert [row["reward/a/odd"] for row in rows] == ["1.0", "text", ""]
    assert rows[0]["reward/a/steps"] == 2.0 and math.isnan(rows[2]["reward/a/steps"])


def test_a_group_is_equal_where_fewer_than_two_rewards_differ():
    groups = scored([1.0, 0.0], [2.0, 2.0], [None, None], [3.0, None], [3.0, None, 3.0], [3.0, None, 4.0])
    assert [is_equal(group) for group in groups] == [False, True, True, True, True, False]


def test_calls_of_tools_are_counted_by_episode():
    (group,) = scored([1.0, 0.5, 0.0, 0.0])
    assert episode_metrics(group.trajectories) == {}
    first, *_ = group.trajectories
    turns = [
        replace(first.turns[0], calls=calls, invalid_calls=bad) for calls, bad in [(2, 0), (0, 1), (1, 0)]
    ]
    episodes = [turns[:1], turns[1:2], [turns[0], turns[2]], [first.turns[0]]]
    played = [replace(first, end="done", turns=tuple(one)) for one in episodes]
    found = episode_metrics(played)
    assert found["tools/calls_mean"] == 5 / 4
    assert found["tools/called_fraction"] == 2 / 4
    assert found["tools/invalid_fraction"] == 1 / 6
    # An environment without tools has no such metrics.
    assert not any(name.startswith("tools/") for name in episode_metrics(played[3:]))


def test_each_source_has_its_own_fraction_reward_and_accuracy():
    sources = ["a", "b", "a", "a", "b", ""]
    prompts = [Prompt(f"train:{place}", (1,), "", source=source) for place, source in enumerate(sources)]
    outcomes = [Outcome("score", value) for value in (1.0, 0.0, 0.5)] + [Outcome.failure("gone")] * 2
    outcomes.append(Outcome("score", 9.0))
    rewards = [outcome.value for outcome in outcomes]
    right = [True, False, False, False, False, True]
    assert source_metrics(prompts, outcomes, rewards, right) == {
        "source/a/fraction": 0.5,
        "source/a/reward/mean": 0.75,
        "source/a/accuracy": 0.5,
        "source/b/fraction": 1 / 3,
        "source/b/reward/mean": 0.0,
        "source/b/accuracy": 0.0,
    }
    assert "source/a/accuracy" not in source_metrics(prompts, outcomes, rewards)
    assert source_metrics(prompts[5:], outcomes[5:], rewards[5:], right[5:]) == {}
