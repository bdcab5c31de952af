"""The second half of a batch: who is trained on, in which optimizer step, and what is recorded of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from millrace.data.packing import pack
from millrace.models.logprobs import chosen_logprobs
from millrace.rollout.sampled_batch import SampledBatch
from millrace.run import train_step
from millrace.types import Group, Outcome
from tests.close import close_fp32, close_fp64
from tests.run.pieces import (
    first_actions,
    make_train_step,
    per_segment,
    recipe,
    run,
    scored,
    watched,
    weight_bits,
)
from tests.training.pieces import tiny_model, trajectory


def centred(num_parts: int = 1, **policy):
    """Reward minus the mean of the group, in so many optimizer steps."""
    return recipe(
        advantage={"divide_by_std": False}, policy={"optimizer_steps_per_batch": num_parts, **policy}
    )


def test_each_optimizer_step_gets_its_share_of_the_groups_and_the_advantages_of_the_whole_batch():
    one = make_train_step(centred(2))
    batches = watched(one.trainer)
    result = run(one, scored([1.0, 0.0], [4.0, 0.0]))
    assert [first_actions(batch) for batch in batches] == [[1, 2], [5, 6]]
    assert [row["advantage"] for row in result.rows] == [0.5, -0.5, 2.0, -2.0]
    assert [per_segment(batch, "advantage_T") for batch in batches] == [
        [[0.5], [-0.5]],
        [[2.0, 2.0], [-2.0, -2.0]],
    ]
    # Shares add up to one within each optimizer step.
    close_fp32([float(batch.weight_T.sum()) for batch in batches], [1.0, 1.0])
    assert (len(result.reports), one.trainer.version) == (2, 2)
    assert (result.tokens_sampled, result.tokens_trained) == (6, 6)


def test_one_optimizer_step_takes_all_groups_at_once():
    one = make_train_step(centred())
    batches = watched(one.trainer)
    result = run(one, scored([1.0, 0.0], [4.0, 0.0]))
    assert [first_actions(batch) for batch in batches] == [[1, 2, 5, 6]]
    assert (len(result.reports), one.trainer.version) == (1, 1)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("num_groups", "left_out", "parts"),
    [
        (4, (), [[0], [1], [2, 3]]),
        (5, (), [[0], [1, 2], [3, 4]]),
        # Those left out are gone before the others are divided.
        (5, (0, 3), [[1], [2], [4]]),
        (6, (1,), [[0], [2, 3], [4, 5]]),
        # Fewer groups than optimizer steps: so many steps less.
        (3, (2,), [[0], [1]]),
    ],
)
def test_the_kept_groups_are_divided_evenly_in_order(num_groups, left_out, parts):
    one = make_train_step(recipe(rollout={"prompts_per_step": 6}, policy={"optimizer_steps_per_batch": 3}))
    batches = watched(one.trainer)
    result = run(one, scored(*[[1.0, 0.0]] * num_groups), left_out=left_out)
    assert [first_actions(batch) for batch in batches] == [
        [4 * g + s + 1 for g in part for s in (0, 1)] for part in parts
    ]
    assert len(result.reports) == len(parts)


def test_a_group_left_out_is_sampled_shown_and_described_and_nothing_else():
    one = make_train_step(centred())
    batches = watched(one.trainer)
    result = run(one, scored([1.0, 0.0], [3.0, 3.0], [0.0, 4.0]), left_out=[1])
    assert [first_actions(batch) for batch in batches] == [[1, 2, 9, 10]]
    shown = [row["advantage"] for row in result.rows]
    assert [math.isnan(advantage) for advantage in shown] == [False] * 2 + [True] * 2 + [False] * 2
    assert shown[:2] + shown[4:] == [0.5, -0.5, -2.0, 2.0]
    assert [row["reward"] for row in result.rows] == [1.0, 0.0, 3.0, 3.0, 0.0, 4.0]
    assert (result.tokens_sampled, result.tokens_trained) == (12, 8)
    close_fp64(result.record["reward/mean"], 11 / 6)
    # Its tokens have no weight in the loss, so the others have all of it.
    close_fp32(float(batches[0].weight_T.sum()), 1.0)


def test_where_every_group_is_left_out_nothing_moves():
    one = make_train_step(centred(2))
    before = weight_bits(one.trainer)
    result = run(one, scored([1.0, 1.0], [3.0, 3.0]), left_out=[0, 1])
    assert (result.reports, result.skipped, one.trainer.version, result.tokens_trained) == ([], [], 0, 0)
    assert torch.equal(before, weight_bits(one.trainer))
    assert [math.isnan(row["advantage"]) for row in result.rows] == [True] * 4
    assert not [name for name in result.record if name.startswith(("policy/", "mismatch/"))]


def test_trajectories_without_advantage_are_left_out_and_change_no_weight(monkeypatch):
    groups = scored([1.0, 0.0], [1.0, 1.0], [0.0, 3.0])
    left_out, kept = make_train_step(centred()), make_train_step(centred())
    ours, theirs = watched(left_out.trainer), watched(kept.trainer)
    result = run(left_out, groups)
    monkeypatch.setattr(train_step, "with_gradient", lambda batch: batch)
    run(kept, groups)
    assert [first_actions(batch) for batch in ours] == [[1, 2, 9, 10]]
    assert [first_actions(batch) for batch in theirs] == [[1, 2, 5, 6, 9, 10]]
    close_fp32(weight_bits(left_out.trainer), weight_bits(kept.trainer))
    assert (result.tokens_sampled, result.tokens_trained) == (12, 8)
    close_fp64(result.record["group/zero_std_fraction"], 1 / 3)
    # The weights were fixed before anything was left out.
    close_fp32(float(ours[0].weight_T.sum()), 8 / 12)


LOSS = {"optimizer_steps_per_batch": 2}
MULTIPLES = [
    LOSS | {"loss": {"kind": kind}}
    for kind in ("ppo_clip", "reinforce", "gspo", "gmpo", "cispo", "sapo", "dppo", "topr", "clip_cov")
]
NOT_MULTIPLES = [
    LOSS | {"loss": {"kind": "dro"}},
    LOSS | {"loss": {"kind": "kl_cov"}},
    {"entropy_coefficient": 0.1},
    {"entropy_coefficient": -0.1},
    {"kl": {"coefficient": 0.1, "place": "loss"}},
    {"kl": {"coefficient": 0.1, "estimator": "full"}},
]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("policy", MULTIPLES + NOT_MULTIPLES, ids=repr)
def test_what_has_no_advantage_is_left_out_only_where_the_loss_is_a_multiple_of_it(policy):
    one = make_train_step(recipe(policy=policy))
    assert one.method.multiple == (policy in MULTIPLES)
    batches = watched(one.trainer)
    run(one, scored([1.0, 0.0], [2.0, 2.0], [0.0, 3.0], [5.0, 5.0]))
    seen = [number for batch in batches for number in first_actions(batch)]
    everybody = [1, 2, 5, 6, 9, 10, 13, 14]
    assert seen == ([1, 2, 9, 10] if policy in MULTIPLES else everybody)


def test_penalties_that_differ_give_samples_of_equal_reward_an_advantage():
    kl = {"coefficient": 0.1, "estimator": "k2", "place": "reward"}
    one = make_train_step(recipe(policy={"kl": kl}))
    assert one.method.multiple
    batches = watched(one.trainer)
    run(one, scored([1.0, 1.0], [2.0, 2.0]))
    assert first_actions(batches[0]) == [1, 2, 5, 6]


def test_a_batch_of_equal_rewards_still_steps():
    one = make_train_step(centred())
    batches = watched(one.trainer)
    result = run(one, scored([1.0, 1.0]))
    assert (batches, one.trainer.version, result.tokens_trained) == ([], 1, 0)
    assert (result.record["policy/grad_norm"], result.record["policy/skipped_steps"]) == (0.0, 0)


def test_a_batch_of_equal_rewards_is_compared_with_the_weights_that_sampled_it():
    """Nonsense earns the same everywhere: a broken sampler must not hide behind it."""
    one, other = make_train_step(centred()), make_train_step(centred())
    found = run(one, scored([1.0, 1.0])).record
    batches = watched(other.trainer)
    run(other, scored([1.0, 0.0]))
    with torch.no_grad():
        logprob_N = chosen_logprobs(tiny_model(), batches[0], temperature=1.0)[0]
    close_fp32(found["mismatch/max"], float((logprob_N + 3.0).abs().max()))


@pytest.mark.parametrize(("versions", "expected"), [((4, 4), 1.5), ((3, 4), 1.0), ((3, 3), None)])
def test_only_segments_of_the_current_weights_alone_are_judged(versions, expected):
    """A fresh token after an older one depends on what the engine kept of the older weights."""
    batch = pack(
        [
            trajectory((5,), (1, 2), logprobs=[-1.0, -1.0], version=versions[0]).scored(
                Outcome("score", 1.0)
            ),
            trajectory((5,), (1,), logprobs=[-1.0], version=versions[1]).scored(Outcome("score", 1.0)),
        ]
    )
    # The largest of the three differences is left out where all are judged.
    found, count = train_step._mismatch(torch.tensor([-3.0, -9.0, -2.0]), batch, 4)
    assert count == (3 if versions == (4, 4) else 1 if expected else 0)
    assert found.get("mismatch/current") == expected
    batch.version_T[1] = 3
    assert train_step._mismatch(torch.tensor([-3.0, -9.0, -2.0]), batch, 4)[1] == (
        1 if versions[1] == 4 else 0
    )


def test_what_is_said_twice_in_a_group_is_computed_once_with_both_shares():
    one = make_train_step(centred())
    batches = watched(one.trainer)
    (first,) = scored([1.0])[0].trajectories
    other = trajectory((5, 6), (7,), logprobs=[-3.0]).scored(Outcome("score", 0.0))
    group = Group(scored([1.0])[0].prompt, (first, first, other))
    result = run(one, [group])
    assert [first_actions(batch) for batch in batches] == [[1, 7]]
    close_fp32(per_segment(batches[0], "weight_T"), [[2 / 3], [1 / 3]])
    close_fp32([row["advantage"] for row in result.rows], [1 / 3, 1 / 3, -2 / 3])
    assert (result.tokens_sampled, result.tokens_trained) == (3, 2)


def test_failed_trajectories_are_in_the_table_and_nowhere_else():
    one = make_train_step(centred(2))
    batches = watched(one.trainer)
    result = run(one, scored([1.0, None, 0.0], [None, None, None]))
    assert [first_actions(batch) for batch in batches] == [[1, 3]]
    # The second half had nobody to learn from: no optimizer step.
    assert (len(result.reports), one.trainer.version) == (1, 1)
    assert [row["outcome"] for row in result.rows] == ["score", "failed", "score", *["failed"] * 3]
    assert [row["advantage"] for row in result.rows][::2][:2] == [0.5, -0.5]
    record = result.record
    close_fp64(
        [record["reward/mean"], record["reward/std"], record["reward/failed_fraction"]], [0.5, 0.5, 4 / 6]
    )


def test_one_usable_trajectory_has_nothing_to_be_compared_with():
    one = make_train_step(centred())
    result = run(one, scored([None, 2.5]))
    assert [row["advantage"] for row in result.rows][1] == 0.0
    assert (result.record["reward/mean"], result.record["reward/std"]) == (2.5, 0.0)
    assert (one.trainer.version, result.tokens_trained) == (1, 0)


def test_a_batch_whose_rewards_all_failed_moves_nothing():
    one = make_train_step(centred())
    before = weight_bits(one.trainer)
    result = run(one, scored([None, None]))
    assert (result.reports, one.trainer.version, result.tokens_trained) == ([], 0, 0)
    assert torch.equal(before, weight_bits(one.trainer))
    assert result.record["reward/failed_fraction"] == 1.0
    assert str(result.record["reward/mean"]) == str(result.record["reward/std"]) == "nan"


def test_a_skipped_step_gives_its_batch_as_evidence():
    one = make_train_step(centred(2))
    batches = watched(one.trainer)
    broken = scored([0.0], [1.0, 0.0], logprob=math.nan)[1]
    result = run(one, [scored([1.0, 0.0])[0], broken])
    assert [report.skipped for report in result.reports] == [False, True]
    assert [id(batch) for batch in result.skipped] == [id(batches[1])]
    assert (one.trainer.version, result.record["policy/skipped_steps"]) == (1, 1)
    # Means are over the step that moved.
    close_fp64(result.record["policy/loss"], result.reports[0].metrics["loss"])


def test_the_record_says_how_far_the_trainer_is_from_the_sampler():
    one = make_train_step(centred(2))
    batches = watched(one.trainer)
    record = run(one, scored([1.0, 0.0], [1.0, 0.0])).record
    # Of the first optimizer step, whose weights are those that sampled.
    with torch.no_grad():
        logprob_N = chosen_logprobs(tiny_model(), batches[0], temperature=1.0)[0]
    difference_N = logprob_N.double() + 3.0
    close_fp32(record["mismatch/k1"], -float(difference_N.mean()))
    close_fp32(record["mismatch/max"], float(difference_N.abs().max()))
    close_fp32(record["mismatch/perplexity_sampler"], math.exp(3.0))
    close_fp32(record["mismatch/chi_square_token"], float((2 * difference_N).exp().mean()) - 1, rtol=1e-4)


def test_tokens_that_the_trainers_own_version_drew_are_also_compared_alone():
    """Where the weights are the same, nothing but arithmetic differs; older tokens do not hide that."""
    prompt = scored([1.0])[0].prompt
    old = trajectory((5, 6), (1,), logprobs=[-9.0]).scored(Outcome("score", 1.0))
    new = trajectory((5, 6), (2,), logprobs=[-3.0], version=4).scored(Outcome("score", 0.0))
    one = make_train_step(centred())
    one.trainer.version = 4
    batches = watched(one.trainer)
    record = run(one, [Group(prompt, (old, new))]).record
    with torch.no_grad():
        logprob_N = chosen_logprobs(tiny_model(), batches[0], temperature=1.0)[0]
    close_fp32(record["mismatch/max"], abs(float(logprob_N[0]) + 9.0))
    close_fp32(
        [record["mismatch/fresh_max"], record["mismatch/fresh_mean"]], [abs(float(logprob_N[1]) + 3)] * 2
    )


@pytest.mark.parametrize("version", [0, 7])
def test_tokens_of_one_version_are_compared_once(version):
    one = make_train_step(centred())
    one.trainer.version = version
    record = run(one, scored([1.0, 0.0])).record
    assert [name for name in record if "fresh" in name] == []
    assert "policy/correction_clip_fraction" not in record


def test_the_record_describes_rewards_and_lengths():
    groups = scored([1.0, 0.0], [4.0, 3.0])
    last = groups[1].trajectories[1].scored(Outcome("invalid", -1.0, "no number"))
    groups[1] = Group(groups[1].prompt, (groups[1].trajectories[0], last))
    record = run(make_train_step(centred()), groups).record
    close_fp64(
        [record["reward/mean"], record["reward/std"], record["reward/invalid_fraction"]],
        [1.0, ((0 + 1 + 9 + 4) / 4) ** 0.5, 0.25],
    )
    assert (record["length/mean"], record["length/max"], record["length/truncated_fraction"]) == (1.5, 2, 0.0)
    assert (record["tokens/sampled"], record["policy/learning_rate"]) == (6, 0.01)
    assert "group/dynamic_sampling_rounds" not in record


def test_the_record_and_the_rows_have_each_of_several_rewards():
    groups = scored([1.0, 0.0], [4.0, 3.0])
    outcomes = [
        Outcome("score", 1.0, "", {"near": 0.25, "exact": 0.75}),
        Outcome("failed", math.nan, "it hung", {"near": math.nan, "exact": 0.0}),
        Outcome("score", 4.0, "", {"near": 0.75, "exact": 3.0}),
        Outcome("score", 3.0, "", {"near": 0.5, "exact": 2.25}),
    ]
    every = [t.scored(o) for t, o in zip([t for g in groups for t in g.trajectories], outcomes, strict=True)]
    result = run(
        make_train_step(centred()),
        [Group(groups[0].prompt, tuple(every[:2])), Group(groups[1].prompt, tuple(every[2:]))],
    )
    record = result.record
    close_fp64([record["reward/near/mean"], record["reward/exact/mean"]], [0.5, 1.5])
    failed = [record[f"reward/{name}/failed_fraction"] for name in ("near", "exact")]
    assert failed == [0.25, 0.0]
    assert [row["reward/exact"] for row in result.rows] == [0.75, 0.0, 3.0, 2.25]
    assert math.isnan(result.rows[1]["reward/near"])


@pytest.mark.parametrize("value", [0.1, 0.7, 1e6, -0.3])
def test_equal_rewards_have_a_deviation_of_exactly_zero(value):
    """The mean of sixteen times 0.1 is rounded."""
    record = run(make_train_step(centred()), scored([value] * 8, [value] * 8)).record
    assert (record["reward/std"], record["reward/mean"]) == (0.0, value)


def test_rounds_and_greedy_tokens_are_recorded():
    one = make_train_step(centred())
    sampled = SampledBatch(scored([1.0, 0.0]), num_greedy_tokens=5, num_rounds=2)
    result = train_step.train_on(one, sampled, seed=0, step=1)
    assert result.record["group/dynamic_sampling_rounds"] == 2
    assert result.tokens_sampled == result.record["tokens/sampled"] == 2 + 5


def test_sources_have_numbers_of_their_own_and_may_have_rewards_of_their_own():
    groups = []
    rewards = {"a": {"z": 1.0}, "b": {"x": 1.0, "y": 2.0}}
    for group, source in zip(scored([1.0, 0.0], [4.0, 0.0]), rewards, strict=True):
        outcomes = [replace(one.outcome, parts=rewards[source]) for one in group.trajectories]
        kept = [one.scored(outcome) for one, outcome in zip(group.trajectories, outcomes, strict=True)]
        groups.append(Group(replace(group.prompt, source=source), tuple(kept)))
    record = run(make_train_step(centred()), groups).record
    assert (record["source/a/fraction"], record["source/b/fraction"]) == (0.5, 0.5)
    assert (record["source/a/reward/mean"], record["source/b/reward/mean"]) == (0.5, 2.0)
    # Of the answers that have it, not of all.
    assert (record["reward/x/mean"], record["reward/x/failed_fraction"]) == (1.0, 0.0)
