"""Several passes over a batch, their order, and answers that ran out of tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from millrace.algorithms.shaping import overlong_penalty
from millrace.config.recipe import ConfigError, derivation
from millrace.run.build_algorithm import build_objective
from tests.close import close_fp32
from tests.run.pieces import (
    before_update,
    first_actions,
    group_of,
    make_train_step,
    per_segment,
    recipe,
    run,
    scored,
    watched,
    weight_bits,
)
from tests.training.pieces import predicted, random_batch

FOUR = ([1.0, 0.0],) * 4


def passes(num_epochs: int, num_parts: int = 2, **policy):
    return recipe(
        advantage={"divide_by_std": False},
        policy={"optimizer_steps_per_batch": num_parts, "epochs_per_batch": num_epochs, **policy},
    )


def batches_of(config, *, step: int = 3):
    one = make_train_step(config)
    batches = watched(one.trainer)
    result = run(one, scored(*FOUR), step=step)
    return one, [first_actions(batch) for batch in batches], result


def test_each_pass_goes_over_the_same_steps_again_with_the_same_advantages():
    one, firsts, result = batches_of(passes(3))
    once = [[1, 2, 5, 6], [9, 10, 13, 14]]
    assert firsts == once * 3
    assert (one.trainer.version, len(result.reports)) == (6, 6)
    assert [row["advantage"] for row in result.rows] == [0.5, -0.5] * 4


def test_from_the_second_step_on_the_ratio_is_clipped():
    def clipped(num_epochs: int) -> float:
        one = make_train_step(passes(num_epochs, 1, loss={"clip_low": 1e-6, "clip_high": 1e-6} | PPO))
        groups = scored(*FOUR, logprob=-3.0)
        exact = one.trainer.scorer.logprobs(before_update(one, *groups))
        assert len(exact)
        return run(one, groups).record["policy/clip_fraction"]

    assert clipped(4) > 0.0


PPO = {"kind": "ppo_clip"}


@pytest.mark.slow
def test_a_shuffled_pass_has_an_order_of_its_own_which_seed_and_batch_decide():
    _, firsts, _ = batches_of(passes(3, 4, shuffle_minibatches=True))
    orders = [firsts[4 * epoch : 4 * epoch + 4] for epoch in range(3)]
    assert all(sorted(order) == [[1, 2], [5, 6], [9, 10], [13, 14]] for order in orders)
    assert len({str(order) for order in orders}) > 1
    assert batches_of(passes(3, 4, shuffle_minibatches=True))[1] == firsts
    assert batches_of(passes(3, 4, shuffle_minibatches=True), step=4)[1] != firsts


def test_one_pass_in_order_is_what_there_was():
    given = [
        weight_bits(batches_of(config)[0].trainer)
        for config in (
            passes(1),
            recipe(advantage={"divide_by_std": False}, policy={"optimizer_steps_per_batch": 2}),
        )
    ]
    assert torch.equal(*given)


def test_a_coefficient_reaches_its_last_value_after_all_passes():
    config = passes(3, 2, entropy_coefficient=1.0, entropy_coefficient_final=0.0)
    batch = random_batch(1)
    given = predicted(batch.sampler_logprob_T[batch.action_mask_T], entropy=1.0)
    objective = build_objective(config.policy, None, 5)
    _, report = objective(replace(given, step=15), batch)
    close_fp32(report["entropy_coefficient"][0], 0.5)
    assert any("9 batches x 2 x 3 passes = 54 optimizer steps" in line for line in derivation(config))


CUT = group_of(((3, 4), 1.0), ((5, 6, 7), 0.0), ((8,), 0.5), cut=(1,))


@pytest.mark.parametrize(
    ("rule", "trained", "advantages"),
    [
        ("train", [3, 5, 8], [0.5, -0.5, 0.0]),
        ("mask", [3, 8], [0.5, -0.5, 0.0]),
        ("filter", [3, 8], [0.25, math.nan, -0.25]),
    ],
)
def test_answers_that_ran_out_of_tokens_are_trained_on_masked_or_filtered(rule, trained, advantages):
    config = recipe(
        advantage={"divide_by_std": False}, policy={"truncated_answers": rule, "entropy_coefficient": 0.1}
    )
    one = make_train_step(config)
    batches = watched(one.trainer)
    result = run(one, [CUT])
    assert [first_actions(batch) for batch in batches] == [trained]
    # The weights of those that are trained on add up to one.
    close_fp32(float(batches[0].weight_T.sum()), 1.0)
    assert [str(row["advantage"]) for row in result.rows] == [str(each) for each in advantages]
    assert result.record["length/truncated_fraction"] > 0.3


@pytest.mark.parametrize("rule", ["mask", "filter"])
def test_a_batch_of_such_answers_alone_moves_nothing(rule):
    one = make_train_step(recipe(policy={"truncated_answers": rule}))
    before = weight_bits(one.trainer)
    result = run(one, [group_of(((3, 4), 1.0), ((5, 6), 0.0), cut=(0, 1))])
    assert torch.equal(weight_bits(one.trainer), before)
    assert result.reports == [] and result.tokens_trained == 0


def test_the_penalty_of_long_answers_grows_to_its_factor():
    rollout = {"max_tokens": 4, "overlong_fraction": 0.5}
    lengths = torch.tensor([2, 3, 4])
    groups = group_of(((3, 4), 1.0), ((5, 6, 7), 1.0), ((8, 3, 3, 3), 1.0))
    shaped = []
    for factor in ({}, {"overlong_penalty": 2.0}):
        config = recipe(advantage={"kind": "returns"}, rollout=rollout | factor)
        rows = per_segment(before_update(make_train_step(config), groups), "advantage_T")
        shaped.append(torch.tensor([row[0] for row in rows]))
    penalty_N = overlong_penalty(lengths, max_tokens=4, buffer=2).float()
    close_fp32(shaped[0], 1 + penalty_N)
    close_fp32(shaped[1], 1 + 2 * penalty_N)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policy": {"shuffle_minibatches": True}},
            "policy.shuffle_minibatches has no effect with policy.optimizer_steps_per_batch 1, which "
            "takes the whole",
        ),
        ({"policy": {"epochs_per_batch": 0}}, "policy.epochs_per_batch is 0: input should be greater than 0"),
        ({"policy": {"truncated_answers": "drop"}}, "policy.truncated_answers is 'drop'"),
        (
            {"rollout": {"overlong_penalty": 2.0}},
            "rollout.overlong_penalty has no effect with rollout.overlong_fraction 0; set that, or remove it",
        ),
        (
            {"loggers": ["comet"]},
            "loggers: 'comet' is no logger; there are: tensorboard, wandb, mlflow, or your own",
        ),
        ({"callbacks": ["Stop"]}, "'Stop' is not of the form module:function"),
        ({"project": "mine"}, "project and run_group are of the loggers wandb and mlflow; add one of them"),
        (
            {"data": {"sources": [{"name": "a", "data": "a.jsonl"}], "train_size": 3}},
            "train_size is of data.train alone; remove it, or give sources smaller files",
        ),
    ],
)
def test_settings_without_an_effect_or_of_another_form_are_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        recipe(**changes)
    assert message in str(caught.value)
