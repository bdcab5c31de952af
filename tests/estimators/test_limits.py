"""Where one method becomes another: the same numbers, token by token, on every draw of the token MDP."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from torch import Tensor

from millrace.algorithms import advantages, losses, ratios, weights
from millrace.algorithms.returns import discounted_returns, length_adaptive_lambda
from tests.close import close_fp64
from tests.estimators.world import Batch, World

STALE, FRESH = World(0), World(0, fresh=True)
BAND = {"low": 0.2, "high": 0.28}


def slope(batch: Batch, loss_T: Tensor) -> Tensor:
    return torch.autograd.grad(loss_T.sum(), batch.policy_T, retain_graph=True)[0]


def close_losses(batch: Batch, one_T: Tensor, other_T: Tensor, *, atol: float = 1e-12) -> None:
    close_fp64(one_T, other_T, atol=atol)
    close_fp64(slope(batch, one_T), slope(batch, other_T), atol=atol)


@pytest.mark.parametrize("size", [2, 3])
def test_leaving_one_out_is_centring_times_n_over_n_less_1(size: int) -> None:
    batch = FRESH.batch(size)
    centred_B = advantages.group_centred(batch.reward_B, *batch.groups)
    close_fp64(advantages.leave_one_out(batch.reward_B, *batch.groups), size / (size - 1) * centred_B)


def test_normalising_is_centring_over_a_number() -> None:
    batch = FRESH.batch(3)
    centred_B = advantages.group_centred(batch.reward_B, *batch.groups)
    spread_B = batch.reward_B.view(-1, 3).std(dim=1).repeat_interleave(3)
    found_B = advantages.group_normalised(batch.reward_B, *batch.groups, epsilon=0.1)
    close_fp64(found_B * (spread_B + 0.1), centred_B)


def test_of_two_the_others_have_no_spread_and_only_the_better_is_rewarded() -> None:
    batch = FRESH.batch(2)
    left_B = advantages.leave_one_out(batch.reward_B, *batch.groups)
    close_fp64(advantages.leave_one_out_normalised(batch.reward_B, *batch.groups), left_B)
    best_B = advantages.pass_at_k(batch.reward_B, *batch.groups, divide_by_std=False)
    close_fp64(best_B, left_B.clamp(min=0))


def test_with_equal_lengths_length_weights_are_the_group_mean() -> None:
    batch = FRESH.batch(3)
    length_B = torch.full_like(batch.length_B, 4)
    close_fp64(
        advantages.length_weighted_centred(batch.reward_B, length_B, *batch.groups),
        advantages.group_centred(batch.reward_B, *batch.groups),
    )


def test_gpg_without_a_reward_of_0_is_the_group_mean() -> None:
    batch = FRESH.batch(2)
    reward_B = batch.reward_B + 7
    close_fp64(advantages.gpg(reward_B, *batch.groups), advantages.group_centred(reward_B, *batch.groups))


def test_one_reward_decoupled_is_normalised() -> None:
    batch = FRESH.batch(3)
    found_B = advantages.group_decoupled(
        batch.reward_B[None], *batch.groups, weight_K=torch.ones(1, dtype=torch.float64)
    )
    close_fp64(found_B, advantages.group_normalised(batch.reward_B, *batch.groups))


def test_the_group_mean_as_a_baseline_is_centring() -> None:
    batch = FRESH.batch(2)
    mean_B = batch.reward_B.view(-1, 2).mean(dim=1).repeat_interleave(2)
    close_fp64(
        advantages.baseline_centred(batch.spread(batch.reward_B), mean_B, batch.segment_T),
        batch.spread(advantages.group_centred(batch.reward_B, *batch.groups)),
    )


def test_reinforce_plus_plus_undone_is_the_centred_return() -> None:
    batch = FRESH.batch(2)
    return_T = discounted_returns(batch.reward_T, batch.length_B, gamma=0.9)
    found_T = advantages.reinforce_plus_plus(batch.reward_T, batch.length_B, gamma=0.9)
    variance = return_T.var()
    close_fp64(found_T * (variance + 1e-8).sqrt(), return_T - return_T.mean())
    centred_T = batch.spread(advantages.group_centred(batch.reward_B, *batch.groups))
    baseline_T = advantages.reinforce_plus_plus_baseline(batch.reward_B, *batch.groups, batch.length_B)
    close_fp64(baseline_T * (centred_T.var() + 1e-8).sqrt(), centred_T - centred_T.mean())


def test_a_token_baseline_of_equal_energies_is_the_mean_of_those_still_there() -> None:
    world = World(2, fresh=True, spread=0.0)  # a uniform policy: every score has the same length
    for batch in islice(world.batch(2), 0, None, 7):
        return_T = batch.spread(batch.reward_B)
        found_T = advantages.optimal_token_baseline(
            return_T,
            batch.policy_T.detach(),
            batch.square_T,
            batch.position_T,
            batch.segment_T,
            batch.group_B,
        )
        both_T = batch.position_T < batch.length_B.min()
        close_fp64(found_T, torch.where(both_T, return_T - batch.reward_B.mean(), return_T), atol=1e-7)


def test_without_bounds_clipped_losses_are_the_plain_ratio() -> None:
    batch = STALE.batch(1)
    ratio_T = (batch.policy_T - batch.sampler_T).exp()
    plain_T = -batch.reward_T * ratio_T
    pair = (batch.policy_T, batch.sampler_T, batch.reward_T)
    close_losses(batch, losses.ppo_clip(*pair, low=1 - 1e-9, high=math.inf), plain_T)
    close_losses(batch, losses.ppo_clip(*pair, low=1 - 1e-9, high=math.inf, dual=1e9), plain_T)
    nobody_T = torch.zeros_like(batch.segment_T).bool()
    close_losses(batch, losses.kl_cov(*pair, nobody_T, coefficient=0.7), plain_T)
    close_losses(batch, losses.kl_cov(*pair, ~nobody_T, coefficient=0.0), plain_T)
    soft_T = losses.sapo(*pair, positive=1e-6, negative=2e-6)
    close_fp64(slope(batch, soft_T), slope(batch, plain_T), atol=1e-9)


def test_at_ratio_1_the_clipped_losses_have_the_gradient_of_reinforce() -> None:
    batch = FRESH.batch(1)
    plain_T = slope(batch, losses.reinforce(batch.policy_T, batch.reward_T))
    for loss_T in (
        losses.ppo_clip(batch.policy_T, batch.sampler_T, batch.reward_T, **BAND),
        losses.sapo(batch.policy_T, batch.sampler_T, batch.reward_T, positive=1.0, negative=1.05),
        losses.dppo_kl(batch.policy_T, batch.sampler_T, batch.reward_T, **BAND, cap=1.0),
        losses.cispo(batch.policy_T, batch.sampler_T, batch.reward_T, **BAND),
    ):
        close_fp64(slope(batch, loss_T), plain_T)


def test_without_a_pull_dro_is_reinforce() -> None:
    batch = STALE.batch(1)
    plain_T = losses.reinforce(batch.policy_T, batch.reward_T)
    found_T = losses.dro(batch.policy_T, batch.sampler_T, batch.reward_T, beta=1e-12)
    close_losses(batch, found_T, plain_T, atol=1e-10)


def test_of_one_token_a_sequence_ratio_is_a_token_ratio() -> None:
    batch = STALE.batch(1)
    alone_T = torch.arange(len(batch.policy_T))
    setting = (batch.policy_T, batch.sampler_T, batch.reward_T, alone_T, len(alone_T))
    token_T = losses.ppo_clip(*setting[:3], **BAND)
    close_losses(batch, losses.gspo(*setting, **BAND), token_T)
    close_losses(batch, losses.gspo_token(*setting, **BAND), token_T)
    # GMPO clips the logarithm.
    in_logs = {"low": -math.log(1 - BAND["low"]), "high": math.log(1 + BAND["high"])}
    close_losses(batch, losses.gmpo(*setting, **in_logs), token_T)


def test_with_one_advantage_per_sequence_both_forms_of_gspo_have_one_gradient() -> None:
    batch = STALE.batch(1)
    setting = (
        batch.policy_T,
        batch.sampler_T,
        batch.spread(batch.reward_B),
        batch.segment_T,
        batch.num_segments,
    )
    close_losses(batch, losses.gspo(*setting, **BAND), losses.gspo_token(*setting, **BAND))


def test_topr_of_good_sequences_is_reinforce_and_of_bad_ones_truncated_importance_sampling() -> None:
    batch = STALE.batch(1)
    setting = (batch.policy_T, batch.sampler_T)
    place = (batch.segment_T, batch.num_segments)
    good_T = batch.reward_T.abs()
    close_losses(batch, losses.topr(*setting, good_T, *place), losses.reinforce(batch.policy_T, good_T))
    log_ratio_T = (batch.policy_T - batch.sampler_T).detach()
    weight_T = ratios.truncate(ratios.importance_weights(log_ratio_T, *place, level="sequence"), high=1.0)
    close_losses(
        batch,
        losses.topr(*setting, -good_T, *place),
        weight_T * losses.reinforce(batch.policy_T, -good_T),
    )


def test_the_decoupled_loss_is_the_plain_one_where_the_proximal_policy_is_the_sampler() -> None:
    batch = STALE.batch(1)
    proximal_T = batch.sampler_T.clone()
    weight_T = ratios.importance_weights(
        proximal_T - batch.sampler_T, batch.segment_T, batch.num_segments, level="token"
    )
    decoupled_T = weight_T * losses.ppo_clip(batch.policy_T, proximal_T, batch.reward_T, **BAND)
    close_losses(batch, decoupled_T, losses.ppo_clip(batch.policy_T, batch.sampler_T, batch.reward_T, **BAND))


def test_weights_without_bounds_are_themselves_and_of_one_token_all_levels_agree() -> None:
    batch = STALE.batch(1)
    log_ratio_T = (batch.policy_T - batch.sampler_T).detach()
    alone_T = torch.arange(len(log_ratio_T))
    token_T = ratios.importance_weights(log_ratio_T, alone_T, len(alone_T), level="token")
    close_fp64(token_T, log_ratio_T.exp())
    for level in ("sequence", "geometric"):
        close_fp64(ratios.importance_weights(log_ratio_T, alone_T, len(alone_T), level=level), token_T)
    close_fp64(ratios.truncate(token_T, high=math.inf), token_T)
    close_fp64(ratios.icepop(token_T, low=0.0, high=math.inf), token_T)
    close_fp64(ratios.effective_sample_size(torch.full((5,), 0.3)), 1.0)
    share = ratios.effective_sample_size(token_T)
    close_fp64(share, float(token_T.sum() ** 2 / (len(token_T) * (token_T**2).sum())))


def test_shares_agree_where_lengths_do() -> None:
    segment_T = torch.arange(4).repeat_interleave(3)
    mask_T = torch.ones_like(segment_T).bool()
    per_token_T = weights.token_mean(mask_T, segment_T)
    close_fp64(weights.sequence_mean(mask_T, segment_T), per_token_T, rtol=1e-6)
    close_fp64(weights.fixed_length(mask_T, segment_T, length=3), per_token_T, rtol=1e-6)
    close_fp64(weights.fixed_length(mask_T, segment_T, length=1), weights.sequence_sum(mask_T, segment_T))
    close_fp64(weights.token_sum(mask_T, segment_T), 12 * per_token_T, rtol=1e-6)


def test_the_adaptive_lambda_goes_from_td_zero_to_monte_carlo() -> None:
    length_B = torch.tensor([1, 3, 20])
    close_fp64(length_adaptive_lambda(length_B, alpha=1e-9), [0, 0, 0])
    close_fp64(length_adaptive_lambda(length_B, alpha=1e15), [1, 1, 1])
