"""From a recipe's words to its arithmetic: every number that is written reaches its function."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from millrace.algorithms import kl, weights
from millrace.config import method_sections as words
from millrace.run.build_algorithm import (
    build_control,
    build_method,
    build_objective,
    build_token_weights,
)
from tests.close import close_fp32, close_fp64
from tests.run.pieces import recipe
from tests.training.pieces import full_batch, predicted, random_batch

TWO = {"optimizer_steps_per_batch": 2}


def test_the_control_of_a_penalty_has_its_numbers():
    assert build_control(recipe().policy.kl) is None
    kl_setting = {"coefficient": 0.3, "target": 0.5, "horizon": 1000}
    control = build_control(recipe(policy={"kl": kl_setting}).policy.kl)
    control.update(50.0, 100)
    close_fp64(control.coefficient, 0.3 * (1 + 0.2 * 100 / 1000))
    fixed = build_control(recipe(policy={"kl": {"coefficient": 0.3}}).policy.kl)
    fixed.update(50.0, 100)
    assert fixed.coefficient == 0.3


ESTIMATORS = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "abs": kl.absolute,
    "k1+": kl.straight_through(kl.k1),
    "k3+": kl.straight_through(kl.k3),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_penalty_of_the_loss_is_the_estimator_of_its_name(name):
    config = recipe(policy={"kl": {"coefficient": 0.3, "estimator": name}})
    batch = full_batch(1)
    mask_T = batch.action_mask_T
    logprob_N = (batch.sampler_logprob_T[mask_T] + 0.1).requires_grad_()
    with_N, report = build_objective(config.policy, build_control(config.policy.kl), config.steps)(
        predicted(logprob_N), batch
    )
    without_N, _ = build_objective(recipe().policy, None, 1)(predicted(logprob_N), batch)
    expected_N = ESTIMATORS[name](logprob_N, batch.reference_logprob_T[mask_T])
    close_fp32(with_N - without_N, 0.3 * expected_N)
    close_fp32(report["kl_reference"], expected_N)
    (ours_N,) = torch.autograd.grad((with_N - without_N).sum(), logprob_N, retain_graph=True)
    (theirs_N,) = torch.autograd.grad(0.3 * expected_N.sum(), logprob_N)
    close_fp32(ours_N, theirs_N)


def test_every_estimator_of_the_divergence_is_compared():
    names = get_args(words.KlConfig.model_fields["estimator"].annotation)
    assert set(names) == {*ESTIMATORS, "full"}
    for name in ("k1", "k2", "k3", "abs"):
        config = recipe(policy={"kl": {"coefficient": 0.3, "estimator": name, "place": "reward"}})
        found = build_method(config).reward_divergence
        a_N, b_N = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.25])
        close_fp32(found(a_N, b_N), ESTIMATORS[name](a_N, b_N))


def test_a_penalty_in_the_reward_is_not_in_the_loss():
    config = recipe(policy={"kl": {"coefficient": 0.3, "estimator": "k1", "place": "reward"}})
    batch = full_batch(1)
    logprob_N = batch.sampler_logprob_T[batch.action_mask_T] + 0.1
    _, report = build_objective(config.policy, build_control(config.policy.kl), config.steps)(
        predicted(logprob_N), batch
    )
    assert "kl_reference" not in report
    in_loss = recipe(policy={"kl": {"coefficient": 0.3}})
    assert build_method(in_loss).reward_divergence is None


def test_the_entropy_bonus_has_its_factor_and_sign():
    batch = full_batch(1)
    given = predicted(batch.sampler_logprob_T[batch.action_mask_T], entropy=2.0)
    plain_N, _ = build_objective(recipe().policy, None, 1)(given, batch)
    bonus = build_objective(recipe(policy={"entropy_coefficient": 0.25}).policy, None, 1)
    close_fp32(bonus(given, batch)[0], plain_N - 0.5)


def test_the_entropy_bonus_changes_in_a_line_over_all_optimizer_steps_and_is_reported():
    batch = full_batch(1)
    mask_T = batch.action_mask_T
    plain_N, _ = build_objective(recipe().policy, None, 1)(predicted(batch.sampler_logprob_T[mask_T]), batch)
    changes = {"entropy_coefficient": 0.3, "entropy_coefficient_final": -0.1, "optimizer_steps_per_batch": 2}
    bonus = build_objective(recipe(policy=changes).policy, None, 5)
    # Ten optimizer steps: 0.04 less at each, and after the end nothing changes.
    for step, coefficient in ((0, 0.3), (1, 0.26), (5, 0.1), (10, -0.1), (12, -0.1)):
        given = replace(predicted(batch.sampler_logprob_T[mask_T], entropy=2.0), step=step)
        loss_N, report = bonus(given, batch)
        close_fp32(loss_N, plain_N - 2.0 * coefficient)
        close_fp32(report["entropy_coefficient"], torch.full_like(plain_N, coefficient))
    rising = recipe(policy={"entropy_coefficient_final": 1.0})
    assert not build_method(rising).multiple


def test_a_method_knows_what_must_be_computed_before_an_update():
    plain = build_method(recipe(rollout={"max_tokens": 7}))
    assert (plain.num_parts, plain.recompute, plain.correction, plain.selection) == (1, False, None, None)
    assert (plain.squares, plain.greedy_baseline, plain.bootstrap_truncated) == (False, False, False)
    assert (plain.max_tokens, plain.overlong_tokens, plain.drop_selected) == (7, 0, False)
    assert plain.multiple and not build_method(recipe(policy={"entropy_coefficient": 1.0})).multiple
    for place, multiple in (("reward", True), ("loss", False)):
        kl_setting = {"coefficient": 0.3, "estimator": "k1", "place": place}
        assert build_method(recipe(policy={"kl": kl_setting})).multiple == multiple
    other = build_method(
        recipe(
            advantage={"kind": "token_baseline"},
            rollout={"max_tokens": 7, "overlong_fraction": 0.4},
            policy={"optimizer_steps_per_batch": 4, "proximal": "recompute", "correction": {"high": 3.0}},
        )
    )
    assert (other.num_parts, other.recompute, other.squares, other.overlong_tokens) == (4, True, True, 3)
    assert other.correction is not None
    assert build_method(recipe(advantage={"kind": "greedy_baseline"})).greedy_baseline
    gae = recipe(advantage={"kind": "gae", "bootstrap_truncated": True}, critic={})
    assert build_method(gae).bootstrap_truncated


def test_with_interpolation_the_correction_is_made_in_the_loss():
    policy = {"optimizer_steps_per_batch": 4, "proximal": "interpolate", "correction": {"high": 1.01}}
    config = recipe(policy=policy)
    method = build_method(config)
    assert (method.correction, method.recompute) == (None, False)
    batch = full_batch(1)
    sampler_N = batch.sampler_logprob_T[batch.action_mask_T]
    batch.proximal_logprob_T = batch.correction_T = None
    given = predicted(sampler_N + 0.5, version=4)
    _, report = build_objective(config.policy, None, config.steps)(given, batch)
    lag_N = (4 - batch.version_T[batch.action_mask_T]).clamp(min=1)
    close_fp32(report["correction"], (0.5 * (1 - 1 / lag_N)).exp().clamp(max=1.01))
    assert 1.0 < float(report["correction"].mean()) < 1.01


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("token_mean", weights.token_mean),
        ("token_sum", weights.token_sum),
        ("sequence_mean", weights.sequence_mean),
        ("sequence_sum", weights.sequence_sum),
        ("fixed_length", partial(weights.fixed_length, length=6)),
    ],
)
def test_token_weights_are_those_of_the_recipe(kind, function):
    config = recipe(rollout={"max_tokens": 6}, policy={"loss_aggregation": kind})
    batch = random_batch(0)
    found_T = build_method(config).token_weights(batch.action_mask_T, batch.segment_T)
    close_fp32(found_T, function(batch.action_mask_T, batch.segment_T))


@pytest.mark.parametrize("kind", ["token_mean", "token_sum", "sequence_mean", "sequence_sum", "fixed_length"])
def test_token_weights_of_a_run_in_float64_are_float64(kind):
    """In float32, a third is off by 1e-8."""
    mask_T, segment_T = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 2])
    config = recipe(rollout={"max_tokens": 7}, policy={"loss_aggregation": kind}, precision="float64")
    found_T = build_method(config).token_weights(mask_T, segment_T)
    weight = {"token_sum": 1.0, "fixed_length": 1 / 21}.get(kind, 1 / 3)
    assert found_T.dtype == torch.float64 and found_T.tolist() == [weight] * 3
    if kind != "fixed_length":
        found_T = build_token_weights(kind, "float64")(mask_T, segment_T)
        assert found_T.dtype == torch.float64 and found_T.tolist() == [weight] * 3
