"""Episodes with branches in a training step: one reward and one advantage each, however many branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millrace.rollout.sampled_batch import episode_metrics
from millrace.types import ROOT, Group, Outcome, Prompt, Trajectory, Turn
from tests.close import close_fp32
from tests.run.pieces import CENTRED, before_update, make_train_step, recipe, run, watched
from tests.training.pieces import completion

PROMPT = Prompt("train:0", (5, 6), "text")


def episode(*turns: tuple[int, tuple[int, ...]], reward: float) -> Trajectory:
    """Turns as (the turn that each follows, sampled tokens)."""
    made = [
        Turn((5, 6), completion(*answer, logprobs=[-2.0] * len(answer)), after=after)
        for after, answer in turns
    ]
    return Trajectory(tuple(made), Outcome("score", reward))


# Three branches, two of which share the first turn; and one branch.
FANNED = episode((ROOT, (7, 8)), (0, (9,)), (0, (10,)), (ROOT, (11,)), reward=1.0)
PLAIN = episode((ROOT, (12, 13)), reward=0.0)
GROUP = Group(PROMPT, (FANNED, PLAIN))


def test_the_baseline_counts_an_episode_once_and_all_its_branches_have_its_advantage():
    batch = before_update(make_train_step(recipe(advantage=CENTRED)), GROUP)
    assert (batch.num_segments, batch.unit_T.unique().tolist()) == (4, [0, 1])
    # The mean over branches would be .75.
    assert batch.advantage_T[batch.action_mask_T].tolist() == [0.5] * 5 + [-0.5] * 2
    assert batch.token_T[batch.action_mask_T].tolist() == [7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("token_mean", [1 / 7] * 7),
        ("sequence_mean", [1 / 10] * 5 + [1 / 4] * 2),
        ("sequence_sum", [1 / 2] * 7),
    ],
)
def test_weights_are_normalized_by_episode(kind, weights):
    step = make_train_step(recipe(advantage=CENTRED, policy={"loss_aggregation": kind}))
    seen = watched(step.trainer)
    result = run(step, [GROUP])
    (batch,) = seen
    close_fp32(batch.weight_T[batch.action_mask_T], torch.tensor(weights))
    assert [row["advantage"] for row in result.rows] == [0.5, -0.5]
    assert result.record["reward/mean"] == 0.5
    assert result.record["tokens/trained"] == 7


def test_each_optimizer_step_has_the_branches_of_its_groups():
    step = make_train_step(recipe(advantage=CENTRED, policy={"optimizer_steps_per_batch": 2}))
    seen = watched(step.trainer)
    other = Group(replace(PROMPT, id="train:1"), (episode((ROOT, (3,)), (ROOT, (4,)), reward=2.0), PLAIN))
    run(step, [GROUP, other])
    assert [one.token_T[one.action_mask_T].tolist() for one in seen] == [
        [7, 8, 9, 10, 11, 12, 13],
        [3, 4, 12, 13],
    ]
    close_fp32(torch.stack([one.weight_T.sum() for one in seen]), torch.ones(2))


def test_a_discount_counts_turns_in_the_order_they_were_sampled():
    # A main conversation (0, 2) and another one (1, 3), one after another.
    made = episode((ROOT, (7,)), (ROOT, (8,)), (0, (9,)), (1, (10,)), reward=1.0)
    step = make_train_step(recipe(advantage={"kind": "returns", "gamma": 0.5}))
    batch = before_update(step, Group(PROMPT, (made,)))
    assert batch.token_T[batch.action_mask_T].tolist() == [7, 9, 8, 10]
    assert batch.advantage_T[batch.action_mask_T].tolist() == [0.125, 0.5, 0.25, 1.0]


def test_penalties_and_a_critic_are_of_the_whole_episode():
    sections = {
        "advantage": {"kind": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False},
        "policy": {"kl": {"coefficient": 0.5, "estimator": "k1", "place": "reward"}},
        "critic": {},
    }
    step = make_train_step(recipe(**sections))
    batch = before_update(step, GROUP)
    mask_T, episode_T = batch.action_mask_T, batch.unit_T
    for index, reward in enumerate((1.0, 0.0)):
        inside_T = mask_T & (episode_T == index)
        # The first token of an episode has all its rewards before it, penalties included.
        first = int(inside_T.nonzero()[0])
        cost_T = batch.sampler_logprob_T - batch.reference_logprob_T
        close_fp32(batch.return_T[first], reward - 0.5 * cost_T[inside_T].sum())


def test_metrics_count_branches_and_roots():
    cut = replace(FANNED, turns=(*FANNED.turns[:3], replace(FANNED.turns[3], refused=3)))
    found = episode_metrics([replace(one, end="done") for one in (cut, PLAIN)])
    assert found["agents/branches_mean"] == 2.0
    assert found["agents/roots_mean"] == 1.5
    assert found["agents/refused_mean"] == 1.5
    plain = replace(PLAIN, end="done", turns=(replace(PLAIN.turns[0], after=None),))
    assert not any(name.startswith("agents/") for name in episode_metrics([plain]))
