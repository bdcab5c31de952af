"""What is computed of a batch before an update: penalties, values, advantages, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from millrace.run.train_step import TrainStep
from millrace.types import Group, Outcome, Turn
from tests.close import close_fp32, close_fp64
from tests.data.pieces import drawn_among
from tests.run.pieces import (
    CENTRED,
    GROUPS,
    TWO,
    before_update,
    group_of,
    make_train_step,
    per_segment,
    recipe,
    reference,
    run,
    scored,
    watched,
    weight_bits,
)
from tests.training.pieces import tiny_model


def test_an_over_long_answer_loses_reward_before_anything_is_estimated():
    config = recipe(advantage=CENTRED, rollout={"max_tokens": 6, "overlong_fraction": 0.6})
    one = make_train_step(config)
    batches = watched(one.trainer)
    answers = [((7,) * length, 0.5) for length in (1, 2, 3, 5, 6)]
    result = run(one, [group_of(*answers)])
    penalties = [0.0, 0.0, -0.25, -0.75, -1.0]
    assert [row[-1] for row in per_segment(batches[0], "reward_T")] == [0.5 + p for p in penalties]
    assert float(batches[0].reward_T.abs().sum()) == 0.5 + 0.5 + 0.25 + 0.25 + 0.5
    close_fp32([row["advantage"] for row in result.rows], [p + 2.0 / 5 for p in penalties])
    # What is recorded is what the reward said.
    assert (result.record["reward/mean"], result.record["reward/std"]) == (0.5, 0.0)


def test_the_same_answer_drawn_among_other_tokens_is_scored_apart():
    among = [[7, 3], [7, 3], [7, 9, 20], None]
    group = group_of(*[((7,), reward) for reward in (1.0, 0.5, 2.0, 0.0)])
    trajectories = [
        replace(one, turns=(Turn((5, 6), drawn_among([7], few and [few], within=[-1.625])),))
        for one, few in zip(group.trajectories, among, strict=True)
    ]
    one = make_train_step(
        recipe(advantage=CENTRED, policy={"kl": {"coefficient": 0.2}, "proximal": "recompute"})
    )
    batch = before_update(one, Group(group.prompt, tuple(trajectories)))
    # -1 - 7 / 8 over all tokens.
    close_fp32(per_segment(batch, "sampler_logprob_T"), [[-1.625]] * 3 + [[-1.875]])
    for name, model in (("reference_logprob_T", tiny_model(9)), ("proximal_logprob_T", one.trainer.model)):
        model.set_attn_implementation("eager")
        logit_V = model(input_ids=torch.tensor([[5, 6]]), use_cache=False).logits[0, -1]
        expected = [logit_V[7] - logit_V[few or range(23)].logsumexp(0) for few in among]
        close_fp32(per_segment(batch, name), torch.stack(expected)[:, None])
        assert len({number.item() for number in expected}) == 3


def in_reward(**more) -> dict:
    return {"kl": {"coefficient": 0.2, "estimator": "k1", "place": "reward"} | more}


def test_the_divergence_is_taken_off_each_tokens_reward_and_off_the_sum():
    groups = scored([1.0, 0.0], [4.0, 1.0])
    one = make_train_step(recipe(advantage=CENTRED, policy=in_reward()))
    batch = before_update(one, *groups)
    sampler, held = per_segment(batch, "sampler_logprob_T"), per_segment(batch, "reference_logprob_T")
    costs = [
        [0.2 * (mine - theirs) for mine, theirs in zip(*pair, strict=True)]
        for pair in zip(sampler, held, strict=True)
    ]
    rewards = [1.0, 0.0, 4.0, 1.0]
    for row, cost, reward in zip(per_segment(batch, "reward_T"), costs, rewards, strict=True):
        close_fp32(row, [*(-c for c in cost[:-1]), reward - cost[-1]])
    assert float(batch.reward_T[~batch.action_mask_T].abs().sum()) == 0.0
    sums = [reward - sum(cost) for reward, cost in zip(rewards, costs, strict=True)]
    assert min(abs(sum(cost)) for cost in costs) > 0.01
    half = [(sums[0] - sums[1]) / 2, (sums[2] - sums[3]) / 2]
    close_fp32([row[0] for row in per_segment(batch, "advantage_T")], [half[0], -half[0], half[1], -half[1]])


def test_with_returns_each_token_pays_its_own_divergence_and_those_after_it():
    one = make_train_step(
        recipe(advantage={"kind": "returns", "gamma": 0.5}, policy=in_reward(estimator="k2"))
    )
    batch = before_update(one, *scored([1.0, 0.0], [4.0, 1.0]))
    for rewards, found in zip(per_segment(batch, "reward_T"), per_segment(batch, "advantage_T"), strict=True):
        following = [*rewards[1:], 0.0]
        close_fp32(found, [r + 0.5 * n for r, n in zip(rewards, following, strict=True)])
    distance_T = batch.sampler_logprob_T - batch.reference_logprob_T
    first = int(batch.action_mask_T.nonzero()[-2, 0])
    close_fp32(batch.reward_T[first], -0.2 * 0.5 * float(distance_T[first]) ** 2)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_coefficient_follows_the_divergence_of_each_batch(place):
    kl = {"coefficient": 0.2, "estimator": "k2", "place": place, "target": 1e-3, "horizon": 400}
    one = make_train_step(recipe(advantage=CENTRED, policy={"kl": kl}))
    # One of the four samples failed, and so is none of the sequences.
    groups = scored([1.0, None], [4.0, 1.0])
    whole = before_update(one, *scored([1.0], [4.0, 1.0]))
    distance_T = whole.sampler_logprob_T - whole.reference_logprob_T
    used = []
    for _ in range(3):
        record = run(one, groups).record
        used.append(record["policy/kl_coefficient"])
        if place == "reward":
            distance_N = distance_T[whole.action_mask_T]
            close_fp32(record["policy/kl_reference"], float((0.5 * distance_N**2).mean()))
        assert record["policy/kl_reference"] > 1e-2
    close_fp64(used, [0.2, 0.2 * (1 + 0.2 * 3 / 400), 0.2 * (1 + 0.2 * 3 / 400) ** 2])
    close_fp64(one.control.coefficient, 0.2 * (1 + 0.2 * 3 / 400) ** 3)


def test_a_divergence_below_its_target_lowers_the_coefficient():
    kl = {"coefficient": 0.2, "estimator": "k2", "target": 1e6, "horizon": 400}
    one = make_train_step(recipe(policy={"kl": kl}))
    assert run(one, scored([1.0, 0.0])).record["policy/kl_coefficient"] == 0.2
    close_fp64(one.control.coefficient, 0.2 * (1 - 0.2 * 2 / 400))


def test_without_a_target_or_a_batch_the_coefficient_stays():
    one = make_train_step(recipe(policy=in_reward()))
    record = run(one, scored([1.0, 0.0])).record
    assert record["policy/kl_coefficient"] == one.control.coefficient == 0.2
    steered = make_train_step(recipe(policy=in_reward(target=1e-9)))
    record = run(steered, scored([None, None])).record
    assert ("policy/kl_coefficient" in record, steered.control.coefficient) == (False, 0.2)


def test_the_greedy_answers_reward_is_the_baseline_and_a_failed_one_leaves_its_group_out():
    one = make_train_step(recipe(advantage={"kind": "greedy_baseline"}, rollout={"samples_per_prompt": 2}))
    batches = watched(one.trainer)
    result = run(one, scored([1.0, 0.0], [2.0, 3.0], [0.5, 4.0]), baselines=[0.25, math.nan, 1.0])
    shown = [row["advantage"] for row in result.rows]
    assert shown[:2] + shown[4:] == [0.75, -0.25, -0.5, 3.0]
    assert [math.isnan(advantage) for advantage in shown] == [False] * 2 + [True] * 2 + [False] * 2
    assert [row["outcome"] for row in result.rows] == ["score"] * 6
    assert per_segment(batches[0], "advantage_T") == [[0.75], [-0.25], [-0.5] * 3, [3.0] * 3]


def test_without_any_greedy_reward_nothing_moves():
    one = make_train_step(recipe(advantage={"kind": "greedy_baseline"}))
    result = run(one, scored([1.0, 0.0]), baselines=[math.nan])
    assert (result.reports, one.trainer.version) == ([], 0)


GAE = {"kind": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False}


def valued(policy: dict | None = None, **more) -> TrainStep:
    return make_train_step(recipe(advantage=GAE | more, critic={}, policy=policy or {}))


def gae(rewards: list[float], values: list[float], final: float) -> list[float]:
    advantage, found = 0.0, []
    for reward, value, following in reversed(list(zip(rewards, values, [*values[1:], final], strict=True))):
        advantage = reward + 0.9 * following - value + 0.9 * 0.8 * advantage
        found.append(advantage)
    return found[::-1]


@pytest.mark.parametrize("bootstrap", [False, True])
def test_only_an_answer_that_ran_out_of_tokens_goes_on_with_the_critics_value(bootstrap):
    """The first two say the same; one of them was cut."""
    one = valued(bootstrap_truncated=bootstrap)
    batch = before_update(one, group_of(((7, 8), 1.0), ((7, 8), 1.0), ((9,), 0.5), cut=(1,)))
    values, finals = one.critic.values(batch)
    rows = per_segment(batch, "value_T")
    close_fp32(rows[0], values[2:4])
    assert float(finals.abs().min()) > 0.01
    goes_on = [0.0, float(finals[1]) if bootstrap else 0.0, 0.0]
    for row, found, returned, reward, final in zip(
        rows,
        per_segment(batch, "advantage_T"),
        per_segment(batch, "return_T"),
        [[0.0, 1.0], [0.0, 1.0], [0.5]],
        goes_on,
        strict=True,
    ):
        close_fp32(found, gae(reward, row, final))
        close_fp32(returned, [a + v for a, v in zip(found, row, strict=True)])


def test_the_critic_learns_beside_the_policy_from_values_of_before_the_batch():
    one = valued(TWO)
    seen, policys = watched(one.critic), watched(one.trainer)
    start = weight_bits(one.critic)
    whole = before_update(one, *scored([1.0, 0.0], [4.0, 1.0]))
    result = run(one, scored([1.0, 0.0], [4.0, 1.0]))
    assert [batch.num_segments for batch in seen] == [2, 2]
    close_fp32(
        [*per_segment(seen[0], "value_T"), *per_segment(seen[1], "value_T")][2],
        per_segment(whole, "value_T")[2],
    )
    close_fp32(per_segment(seen[1], "return_T")[1], per_segment(whole, "return_T")[3])
    assert not torch.equal(start, weight_bits(one.critic))
    assert (one.critic.num_attempts, one.trainer.version, len(policys)) == (2, 2, 2)
    record = result.record
    assert {"critic/loss", "critic/value", "critic/explained_variance", "policy/loss"} <= record.keys()
    assert (record["critic/skipped_steps"], record["critic/learning_rate"]) == (0, 0.01)


def test_in_the_critics_sft_the_policy_stays_as_it_is():
    one = valued(TWO)
    policys = watched(one.trainer)
    policy, critic = weight_bits(one.trainer), weight_bits(one.critic)
    result = run(one, scored([1.0, 0.0], [4.0, 1.0]), policy_moves=False)
    assert torch.equal(policy, weight_bits(one.trainer))
    assert not torch.equal(critic, weight_bits(one.critic))
    assert (one.trainer.version, one.trainer.num_attempts, one.critic.num_attempts) == (0, 0, 2)
    assert (policys, result.reports, result.tokens_trained) == ([], [], 0)
    assert not [name for name in result.record if name.startswith("policy/")]
    assert result.record["critic/loss"] > 0
    assert not any(math.isnan(row["advantage"]) for row in result.rows)


def test_the_teacher_is_asked_of_the_tokens_that_were_sampled():
    config = recipe(advantage={"kind": "teacher", "path": "nowhere", "gamma": 0.5})
    one = make_train_step(config, teacher=reference(2))
    batch = before_update(one, *scored([1.0, 0.0], [4.0, 1.0]))
    gain_T = reference(2).logprobs(batch) - batch.sampler_logprob_T
    first, second = batch.action_mask_T.nonzero()[-2:, 0].tolist()
    close_fp32(batch.advantage_T[second], gain_T[second])
    close_fp32(batch.advantage_T[first], gain_T[first] + 0.5 * gain_T[second])


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    "advantage",
    [
        {"kind": "reinforce_plus_plus"},
        {"kind": "reinforce_plus_plus_baseline"},
        {"kind": "gae"},
    ],
)
def test_advantages_are_whitened_over_the_whole_batch_and_not_over_its_parts(advantage):
    more = {"critic": {}} if advantage["kind"] == "gae" else {}
    one = make_train_step(recipe(advantage=advantage, policy=TWO, **more))
    batches = watched(one.trainer)
    run(one, scored(*GROUPS))
    chosen = [batch.advantage_T[batch.action_mask_T].double() for batch in batches]
    everything = torch.cat(chosen)
    close_fp32([float(everything.mean()), float(everything.std())], [0.0, 1.0])
    assert abs(float(chosen[0].std()) - 1) > 0.02


def test_rewards_apart_are_weighed_in_their_order():
    rewards = [{"kind": "exact", "weight": 2.0}, {"kind": "gsm8k", "weight": -1.0}]
    one = make_train_step(recipe(advantage={"kind": "group_decoupled"}, rewards=rewards))
    columns = [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
    group = group_of(*[((n + 7,), 0.0) for n in range(3)])
    judged = [
        t.scored(Outcome("score", 2 * a - b, parts={"exact": a, "gsm8k": b}))
        for t, (a, b) in zip(group.trajectories, columns, strict=True)
    ]
    batch = before_update(one, replace(group, trajectories=tuple(judged)))
    # Each column is normalised to (2, -1, -1) / sqrt 3, so their sum is (5, -1, -4) / sqrt 3, then whitened.
    close_fp32(
        [row[0] for row in per_segment(batch, "advantage_T")],
        [5 / 21**0.5, -1 / 21**0.5, -4 / 21**0.5],
        rtol=1e-4,
    )


def test_the_token_baseline_is_given_the_squares_of_the_policys_own_probabilities():
    one = make_train_step(recipe(advantage={"kind": "token_baseline"}))
    batch = before_update(one, *scored([0.0, 0.0], [4.0, 1.0]))
    squares = one.trainer.scorer.squares(batch)
    energy_T = 1 - 2 * batch.sampler_logprob_T.exp() + squares
    first, second = (float(energy_T[batch.segment_T == b][2:].sum()) for b in (2, 3))
    mean = (4.0 * first + second) / (first + second)
    assert abs(mean - 2.5) > 1e-3
    close_fp32([row[1] for row in per_segment(batch, "advantage_T")[2:]], [4.0 - mean, 1.0 - mean])
