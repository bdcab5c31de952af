"""From a recipe's words to its arithmetic: every number that is written reaches its function."""

from __future__ import annotations

import math
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from millrace.algorithms import advantages, kl, losses, ratios, weights
from millrace.algorithms.losses import LossTerms
from millrace.config import method_sections as words
from millrace.training import estimate
from millrace.training.estimate import Scored
from millrace.training.method import (
    build_control,
    build_correction,
    build_estimator,
    build_loss,
    build_method,
    build_objective,
    build_sft_token_weights,
    build_token_weights,
)
from tests.close import close_fp32, close_fp64
from tests.run.pieces import recipe
from tests.training.pieces import full_batch, predicted, random_batch

TWO = {"optimizer_steps_per_batch": 2}


def kinds_of(union) -> set[str]:
    return {get_args(one.model_fields["kind"].annotation)[0] for one in get_args(get_args(union)[0])}


def terms(seed: int = 0) -> LossTerms:
    batch = full_batch(seed)
    mask_T, generator = batch.action_mask_T, torch.Generator().manual_seed(seed)
    start_N = batch.proximal_logprob_T[mask_T]
    return LossTerms(
        start_N + 0.4 * torch.randn(len(start_N), generator=generator),
        start_N,
        batch.advantage_T[mask_T],
        batch.segment_T[mask_T],
        batch.num_segments,
        batch.selected_T[mask_T],
    )


def by_token(function, **settings):
    return lambda t: function(t.policy_N, t.start_N, t.advantage_N, **settings)


def by_sequence(function, **settings):
    return lambda t: function(t.policy_N, t.start_N, t.advantage_N, t.segment_N, t.num_segments, **settings)


def mean_clipped(t: LossTerms) -> Tensor:
    mean_N = losses.sequence_log_ratio(t.policy_N, t.start_N, t.segment_N, t.num_segments)
    return losses.clipped(mean_N, torch.zeros_like(mean_N), t.advantage_N, low=0.1, high=0.3)


BAND = {"low": 0.1, "high": 0.3}
CLIPPED = {"clip_low": 0.1, "clip_high": 0.3}
LOSSES = [
    (
        {"kind": "ppo_clip", **CLIPPED, "dual_clip": 1.4},
        by_token(losses.ppo_clip, **BAND, dual=1.4),
        by_token(losses.clipped, **BAND),
    ),
    ({"kind": "reinforce"}, lambda t: losses.reinforce(t.policy_N, t.advantage_N), None),
    ({"kind": "gspo", **CLIPPED}, by_sequence(losses.gspo, **BAND), mean_clipped),
    (
        {"kind": "gspo", **CLIPPED, "gradient": "token"},
        by_sequence(losses.gspo_token, **BAND),
        mean_clipped,
    ),
    ({"kind": "gmpo", **CLIPPED}, by_sequence(losses.gmpo, **BAND), None),
    ({"kind": "cispo", **CLIPPED}, by_token(losses.cispo, **BAND), None),
    (
        {"kind": "sapo", "positive": 0.7, "negative": 2.0},
        by_token(losses.sapo, positive=0.7, negative=2.0),
        None,
    ),
    (
        {"kind": "dppo", "clip_low": 0.01, "clip_high": 0.03, "cap": 1.1},
        by_token(losses.dppo_tv, low=0.01, high=0.03, cap=1.1),
        by_token(losses.dppo_tv_clipped, low=0.01, high=0.03),
    ),
    (
        {"kind": "dppo", "divergence": "kl", "clip_low": 1e-3, "clip_high": 3e-3, "cap": 1.1},
        by_token(losses.dppo_kl, low=1e-3, high=3e-3, cap=1.1),
        by_token(losses.dppo_kl_clipped, low=1e-3, high=3e-3),
    ),
    ({"kind": "dro", "beta": 0.7}, by_token(losses.dro, beta=0.7), None),
    ({"kind": "topr"}, by_sequence(losses.topr), None),
    ({"kind": "clip_cov", **CLIPPED}, by_token(losses.ppo_clip, **BAND), by_token(losses.clipped, **BAND)),
    (
        {"kind": "kl_cov", "coefficient": 0.6},
        lambda t: losses.kl_cov(t.policy_N, t.start_N, t.advantage_N, t.selected_N, coefficient=0.6),
        None,
    ),
]


@pytest.mark.parametrize(("setting", "function", "outside"), LOSSES, ids=[str(case[0]) for case in LOSSES])
def test_a_loss_is_the_function_of_its_name_with_its_own_numbers(setting, function, outside):
    config = recipe(policy=TWO | {"loss": setting})
    for seed in range(3):
        given = terms(seed)
        given.policy_N.requires_grad_()
        loss_N, outside_N = build_loss(config.policy.loss)(given)
        expected_N = function(given)
        close_fp32(loss_N, expected_N)
        weight_N = torch.linspace(-1, 2, len(loss_N))
        slopes = [
            torch.autograd.grad((x_N * weight_N).sum(), given.policy_N)[0] for x_N in (loss_N, expected_N)
        ]
        close_fp32(*slopes)
        assert (outside_N is None) == (outside is None)
        if outside is not None:
            assert outside_N.tolist() == outside(given).tolist()
            assert 0 < int(outside_N.sum()) < len(outside_N)


def test_every_kind_of_loss_is_compared():
    assert {setting["kind"] for setting, _, _ in LOSSES} == kinds_of(words.LossConfig)


def test_dual_clipping_is_off_unless_it_is_asked_for():
    far = LossTerms(
        torch.tensor([1.0]),
        torch.tensor([-1.0]),
        torch.tensor([-1.0]),
        torch.tensor([0]),
        1,
        None,
    )
    assert build_loss(words.PpoClipLoss(dual_clip=3.0))(far)[0].item() == 3.0
    close_fp32(build_loss(words.PpoClipLoss())(far)[0], [math.e**2])


GROUPS = [
    ({}, advantages.group_normalised),
    ({"epsilon": 0.5}, partial(advantages.group_normalised, epsilon=0.5)),
    ({"lone_reward": True}, partial(advantages.group_normalised, lone_reward=True)),
    ({"divide_by_std": False}, advantages.group_centred),
    ({"baseline": "others", "divide_by_std": False}, advantages.leave_one_out),
    ({"baseline": "others", "epsilon": 0.5}, partial(advantages.leave_one_out_normalised, epsilon=0.5)),
    ({"kind": "leave_one_out"}, advantages.leave_one_out),
    ({"kind": "gpg"}, advantages.gpg),
    ({"kind": "pass_at_k"}, advantages.pass_at_k),
    ({"kind": "pass_at_k", "divide_by_std": False}, partial(advantages.pass_at_k, divide_by_std=False)),
]


def scored() -> Scored:
    """Groups of three, three and one."""
    reward_N = torch.tensor([1.0, 0.0, 0.25, 2.0, 3.0, 0.5, 4.0], dtype=torch.float64)
    return Scored(random_batch(0), reward_N, torch.tensor([0, 0, 0, 1, 1, 1, 2]), 3)


@pytest.mark.parametrize(("setting", "function"), GROUPS, ids=[str(case[0]) for case in GROUPS])
def test_advantages_of_groups_are_the_function_of_their_name(setting, function):
    one = scored()
    found_N, return_N = build_estimator(recipe(advantage=setting))(one)
    expected_N = function(one.reward_N, one.group_N, 3)
    close_fp32(found_N, expected_N[one.chosen.segment_N])
    assert return_N is None


SCANNED = [
    ({"kind": "reinforce_plus_plus", "gamma": 0.9}, estimate.reinforce_plus_plus, {"gamma": 0.9}),
    ({"kind": "greedy_baseline"}, estimate.greedy_baseline, {}),
    ({"kind": "token_baseline"}, estimate.token_baseline, {"by_action": False}),
    ({"kind": "token_baseline", "align": "action"}, estimate.token_baseline, {"by_action": True}),
    ({"kind": "returns", "gamma": 0.8}, estimate.discounted, {"gamma": 0.8}),
    ({"kind": "teacher", "path": "x", "gamma": 0.7}, estimate.teacher, {"gamma": 0.7}),
    (
        {"kind": "gae", "gamma": 0.9, "lam": 0.8, "critic_lam": 0.7, "whiten": False},
        estimate.generalised,
        {"gamma": 0.9, "lam": 0.8, "length_adaptive": None, "critic_lam": 0.7, "whitened": False},
    ),
    (
        {"kind": "gae", "length_adaptive": 0.3},
        estimate.generalised,
        {"gamma": 1.0, "lam": 1.0, "length_adaptive": 0.3, "critic_lam": None, "whitened": True},
    ),
    (
        {"kind": "n_step", "gamma": 0.9, "num_steps": 3, "whiten": False},
        estimate.n_step,
        {"gamma": 0.9, "num_steps": 3, "whitened": False},
    ),
    (
        {"kind": "v_trace", "gamma": 0.9, "lam": 0.8, "max_rho": 2.0, "max_c": 1.5, "whiten": False},
        estimate.v_trace,
        {"gamma": 0.9, "lam": 0.8, "max_rho": 2.0, "max_c": 1.5, "whitened": False},
    ),
]


@pytest.mark.parametrize(("setting", "function", "settings"), SCANNED, ids=[str(case[0]) for case in SCANNED])
def test_advantages_over_time_take_the_recipes_numbers_and_its_scan(setting, function, settings):
    more = {"critic": {}} if setting["kind"] in words.VALUED else {}
    more |= {"policy": {"proximal": "recompute"}} if setting["kind"] == "v_trace" else {}
    found = build_estimator(recipe(advantage=setting, kernels={"scan": "loop"}, **more))
    assert (found.func, found.keywords) == (function, settings | {"scan": "loop"})


def test_every_kind_of_advantage_is_compared():
    others = {"length_weighted", "group_decoupled", "reinforce_plus_plus_baseline"}
    assert build_estimator(recipe(advantage={"kind": "length_weighted"})) is estimate.length_weighted
    plus = recipe(advantage={"kind": "reinforce_plus_plus_baseline"})
    assert build_estimator(plus) is estimate.reinforce_plus_plus_baseline
    rewards = [{"kind": "exact", "weight": 0.5}, {"kind": "gsm8k", "weight": -2.0}]
    apart = build_estimator(recipe(advantage={"kind": "group_decoupled"}, rewards=rewards))
    assert (apart.func, apart.keywords) == (estimate.group_decoupled, {"weights": [0.5, -2.0]})
    found = {setting.get("kind", "group") for setting, _ in GROUPS} | {s["kind"] for s, _, _ in SCANNED}
    assert found | others == kinds_of(words.AdvantageConfig)
    # Those that use a scan are those that take its setting.
    assert {s["kind"] for s, _, _ in SCANNED} == set(words.SCANNED)


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
    found_T = build_token_weights(config)(batch.action_mask_T, batch.segment_T)
    close_fp32(found_T, function(batch.action_mask_T, batch.segment_T))


def correct(setting: dict, log_ratios: list[list[float]]) -> list[float]:
    x_N = torch.tensor([x for row in log_ratios for x in row])
    segment_N = torch.tensor([n for n, row in enumerate(log_ratios) for _ in row])
    config = words.CorrectionConfig.model_validate(setting)
    return build_correction(config)(x_N, segment_N, len(log_ratios)).tolist()


# Ratios of 2, 1/4, 3 and of 1/2.
X = [[math.log(2), math.log(0.25), math.log(3)], [math.log(0.5)]]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, [2.0, 0.25, 2.0, 0.5]),
        ({"high": 2.5}, [2.0, 0.25, 2.5, 0.5]),
        ({"action": "mask", "low": 0.4, "high": 2.5}, [2.0, 0.0, 0.0, 0.5]),
        ({"action": "mask", "high": 2.5}, [2.0, 0.25, 0.0, 0.5]),
        ({"level": "sequence"}, [1.5, 1.5, 1.5, 0.5]),
        ({"level": "geometric"}, [*[1.5 ** (1 / 3)] * 3, 0.5]),
        ({"high": 4.0, "normalise": True}, [x / 1.4375 for x in (2.0, 0.25, 3.0, 0.5)]),
        ({"level": "sequence", "normalise": True}, [1.5, 1.5, 1.5, 0.5]),
        # The mean is over sequences where each has one weight.
        ({"level": "sequence", "high": 1.25, "normalise": True}, [*[1.25 / 0.875] * 3, 0.5 / 0.875]),
        # k1 within 1 / 2.5 and 2.5: the ratios 1/4 and 3 are out.
        ({"high": 4.0, "reject": {"high": 2.5}}, [2.0, 0.0, 0.0, 0.5]),
    ],
)
def test_a_correction_weighs_bounds_normalises_and_rejects(setting, expected):
    close_fp32(correct(setting, X), expected)


def test_a_correction_beside_a_rejection_takes_every_setting_of_it():
    reject = {"estimator": "k3", "level": "mean", "high": 0.5}
    found = correct({"high": 9.0, "reject": reject}, X)
    x_N = torch.tensor([x for row in X for x in row])
    keep_N = ratios.rejection(
        x_N, torch.tensor([0, 0, 0, 1]), 2, estimator="k3", level="mean", low=None, high=0.5
    )
    assert keep_N.tolist() == [False, False, False, True]
    close_fp32(found, (x_N.exp() * keep_N).tolist())
    lower = {"estimator": "k1", "level": "token", "low": 0.3, "high": 2.1}
    close_fp32(correct({"high": 9.0, "reject": lower}, X), [2.0, 0.0, 3.0, 0.5])


def test_the_control_of_a_penalty_has_its_numbers():
    assert build_control(recipe()) is None
    kl_setting = {"coefficient": 0.3, "target": 0.5, "horizon": 1000}
    control = build_control(recipe(policy={"kl": kl_setting}))
    control.update(50.0, 100)
    close_fp64(control.coefficient, 0.3 * (1 + 0.2 * 100 / 1000))
    fixed = build_control(recipe(policy={"kl": {"coefficient": 0.3}}))
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
    with_N, report = build_objective(config, build_control(config))(predicted(logprob_N), batch)
    without_N, _ = build_objective(recipe(), None)(predicted(logprob_N), batch)
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
    _, report = build_objective(config, build_control(config))(predicted(logprob_N), batch)
    assert "kl_reference" not in report
    in_loss = recipe(policy={"kl": {"coefficient": 0.3}})
    assert build_method(in_loss).reward_divergence is None


def test_the_entropy_bonus_has_its_factor_and_sign():
    batch = full_batch(1)
    given = predicted(batch.sampler_logprob_T[batch.action_mask_T], entropy=2.0)
    plain_N, _ = build_objective(recipe(), None)(given, batch)
    bonus = build_objective(recipe(policy={"entropy_coefficient": 0.25}), None)
    close_fp32(bonus(given, batch)[0], plain_N - 0.5)


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
    _, report = build_objective(config, None)(given, batch)
    lag_N = (4 - batch.version_T[batch.action_mask_T]).clamp(min=1)
    close_fp32(report["correction"], (0.5 * (1 - 1 / lag_N)).exp().clamp(max=1.01))
    assert 1.0 < float(report["correction"].mean()) < 1.01


@pytest.mark.parametrize("kind", ["token_mean", "token_sum", "sequence_mean", "sequence_sum", "fixed_length"])
def test_token_weights_of_a_run_in_float64_are_float64(kind):
    """In float32, a third is off by 1e-8."""
    mask_T, segment_T = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 2])
    config = recipe(rollout={"max_tokens": 7}, policy={"loss_aggregation": kind}, precision="float64")
    found_T = build_token_weights(config)(mask_T, segment_T)
    weight = {"token_sum": 1.0, "fixed_length": 1 / 21}.get(kind, 1 / 3)
    assert found_T.dtype == torch.float64 and found_T.tolist() == [weight] * 3
    if kind != "fixed_length":
        of_sft = recipe(sft={"steps": 1, "loss_aggregation": kind}, precision="float64")
        found_T = build_sft_token_weights(of_sft)(mask_T, segment_T)
        assert found_T.dtype == torch.float64 and found_T.tolist() == [weight] * 3
