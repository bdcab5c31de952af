"""From a recipe's words to its arithmetic: advantages, losses, corrections and penalties.

With `build.py` the only place where a `kind` is looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from millrace.algorithms import advantages, kl, losses, ratios, weights
from millrace.algorithms.kl import Divergence
from millrace.algorithms.losses import PolicyLoss
from millrace.algorithms.ratios import Correction
from millrace.config import method_sections as words
from millrace.config.settings import RunConfig
from millrace.data.packing import TokenWeights
from millrace.kernels.dispatch import Scan
from millrace.training import estimate
from millrace.training.estimate import Estimator
from millrace.training.kl_control import KlControl
from millrace.training.policy import KlPenalty, Objective, PolicyObjective

# log-probabilities before the step, what the ratio is taken to, advantages [N], seed -> tokens apart.
Selection = Callable[[Tensor, Tensor, Tensor, int], Tensor]
# Token weights by `loss_aggregation`; `fixed_length` also needs the length.
TOKEN_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "token_mean": weights.token_mean,
    "token_sum": weights.token_sum,
    "sequence_mean": weights.sequence_mean,
    "sequence_sum": weights.sequence_sum,
}


@dataclass(frozen=True, slots=True)
class Method:
    """The arithmetic of a recipe, apart from models and optimizers.

    Attributes:
        num_parts: optimizer steps a batch is divided into.
        recompute: the ratio is taken to the trainer's own log-probabilities before the batch.
        correction: factor of a token's loss, from the ratio of the former over the sampler's.
        bounded: which tokens have a weight outside the correction's bounds, from the same.
        selection: tokens the loss treats apart, chosen before each optimizer step over all of it.
        drop_selected: their policy loss is left out.
        multiple: the loss is a multiple of the advantage, so that a segment without one moves nothing.
        reward_divergence: estimator of the KL divergence that is taken off the rewards.
        squares: the estimator needs the sums of squared probabilities.
        bootstrap_truncated: answers that ran out of tokens go on with the critic's value.
        overlong_tokens: over so many tokens before `max_tokens` the reward sinks by up to 1.
    """

    estimator: Estimator
    token_weights: TokenWeights
    num_parts: int
    recompute: bool
    correction: Correction | None
    bounded: Correction | None
    selection: Selection | None
    drop_selected: bool
    multiple: bool
    reward_divergence: Divergence | None
    squares: bool
    greedy_baseline: bool
    bootstrap_truncated: bool
    max_tokens: int
    overlong_tokens: int


def build_method(config: RunConfig) -> Method:
    """The arithmetic that a recipe asks for."""
    policy, advantage, loss = config.policy, config.advantage, config.policy.loss
    in_loss = policy.kl is not None and policy.kl.place == "loss"
    held = in_loss or policy.entropy_coefficient != 0 or isinstance(loss, words.DroLoss | words.KlCovLoss)
    # A segment without an advantage is balanced all the same.
    held = held or policy.router_aux_coefficient > 0
    correction = build_correction(policy.correction) if policy.correction else None
    in_reward = policy.kl is not None and policy.kl.place == "reward"
    return Method(
        estimator=build_estimator(config),
        token_weights=build_token_weights(config),
        num_parts=policy.optimizer_steps_per_batch,
        recompute=policy.proximal == "recompute",
        correction=None if policy.proximal == "interpolate" else correction,
        bounded=build_bounded(policy.correction) if policy.correction else None,
        selection=_selection(loss),
        drop_selected=isinstance(loss, words.ClipCovLoss),
        multiple=not held,
        reward_divergence=_divergence(policy.kl.estimator) if policy.kl and in_reward else None,
        squares=advantage.kind == "token_baseline",
        greedy_baseline=advantage.kind == "greedy_baseline",
        bootstrap_truncated=isinstance(advantage, words.GaeAdvantage) and advantage.bootstrap_truncated,
        max_tokens=config.rollout.max_tokens,
        overlong_tokens=config.rollout.overlong_tokens,
    )


def build_objective(config: RunConfig, control: KlControl | None) -> Objective:
    """Build the policy's objective; `control` is that of the KL penalty, if the recipe has one."""
    policy = config.policy
    penalty = None
    if policy.kl is not None and policy.kl.place == "loss" and control is not None:
        full = policy.kl.estimator == "full"
        penalty = KlPenalty(control, None if full else _divergence(policy.kl.estimator))
    return PolicyObjective(
        build_loss(policy.loss),
        interpolate=policy.proximal == "interpolate",
        correction=build_correction(policy.correction) if policy.correction else None,
        entropy_coefficient=policy.entropy_coefficient,
        penalty=penalty,
    )


def build_control(config: RunConfig) -> KlControl | None:
    """The coefficient of the recipe's KL penalty."""
    penalty = config.policy.kl
    if penalty is None:
        return None
    return KlControl(penalty.coefficient, target=penalty.target, horizon=penalty.horizon)


def build_token_weights(config: RunConfig) -> TokenWeights:
    """Token weights of an optimizer step of reinforcement, in float64 where the weights are."""
    if config.policy.loss_aggregation == "fixed_length":
        return partial(weights.fixed_length, length=config.rollout.max_tokens, dtype=_weight_dtype(config))
    return partial(TOKEN_WEIGHTS[config.policy.loss_aggregation], dtype=_weight_dtype(config))


def build_sft_token_weights(config: RunConfig) -> TokenWeights:
    """Token weights of an optimizer step of SFT, which the recipe has."""
    assert config.sft is not None
    return partial(TOKEN_WEIGHTS[config.sft.loss_aggregation], dtype=_weight_dtype(config))


def _weight_dtype(config: RunConfig) -> torch.dtype:
    return torch.float64 if config.precision == "float64" else torch.float32


def build_estimator(config: RunConfig) -> Estimator:
    """What is better than expected, by the recipe's kind of advantage."""
    advantage, scan = config.advantage, config.kernels.scan
    match advantage:
        case words.GroupAdvantage():
            return estimate.per_trajectory(_group(advantage), whitened=advantage.whiten)
        case words.LeaveOneOutAdvantage():
            return estimate.per_trajectory(advantages.leave_one_out)
        case words.GpgAdvantage():
            return estimate.per_trajectory(advantages.gpg)
        case words.PassAtKAdvantage():
            return estimate.per_trajectory(
                partial(advantages.pass_at_k, divide_by_std=advantage.divide_by_std)
            )
        case words.LengthWeightedAdvantage():
            return estimate.length_weighted
        case words.GroupDecoupledAdvantage():
            return partial(estimate.group_decoupled, weights=[reward.weight for reward in config.rewards])
        case words.ReinforcePlusPlusBaselineAdvantage():
            return estimate.reinforce_plus_plus_baseline
        case words.ReinforcePlusPlusAdvantage():
            return partial(estimate.reinforce_plus_plus, gamma=advantage.gamma, scan=scan)
        case words.GreedyBaselineAdvantage():
            return partial(estimate.greedy_baseline, scan=scan)
        case words.TokenBaselineAdvantage():
            return partial(estimate.token_baseline, by_action=advantage.align == "action", scan=scan)
        case words.ReturnsAdvantage():
            return partial(estimate.discounted, gamma=advantage.gamma, scan=scan)
        case words.TeacherAdvantage():
            return partial(estimate.teacher, gamma=advantage.gamma, scan=scan)
        case _:
            return _valued(advantage, scan)


def _valued(
    advantage: words.GaeAdvantage | words.NStepAdvantage | words.VTraceAdvantage, scan: Scan
) -> Estimator:
    if isinstance(advantage, words.GaeAdvantage):
        return partial(
            estimate.generalised,
            gamma=advantage.gamma,
            lam=advantage.lam,
            length_adaptive=advantage.length_adaptive,
            critic_lam=advantage.critic_lam,
            whitened=advantage.whiten,
            scan=scan,
        )
    if isinstance(advantage, words.NStepAdvantage):
        return partial(
            estimate.n_step,
            gamma=advantage.gamma,
            num_steps=advantage.num_steps,
            whitened=advantage.whiten,
            scan=scan,
        )
    return partial(
        estimate.v_trace,
        gamma=advantage.gamma,
        lam=advantage.lam,
        max_rho=advantage.max_rho,
        max_c=advantage.max_c,
        whitened=advantage.whiten,
        scan=scan,
    )


def _group(advantage: words.GroupAdvantage) -> Callable[[Tensor, Tensor, int], Tensor]:
    if advantage.baseline == "others":
        if advantage.divide_by_std:
            return partial(advantages.leave_one_out_normalised, epsilon=advantage.epsilon)
        return advantages.leave_one_out
    if advantage.divide_by_std:
        return partial(
            advantages.group_normalised, epsilon=advantage.epsilon, lone_reward=advantage.lone_reward
        )
    return advantages.group_centred


def build_loss(loss: words.LossConfig) -> PolicyLoss:
    """The policy loss of a token, by the recipe's kind of loss."""
    return PolicyLoss(loss.kind, loss.model_dump(exclude={"kind"}))


def _selection(loss: words.LossConfig) -> Selection | None:
    if isinstance(loss, words.KlCovLoss):
        fraction = loss.fraction
        return lambda logprob_N, start_N, advantage_N, seed: losses.kl_cov_selection(
            losses.covariance(logprob_N, advantage_N), fraction=fraction
        )
    if not isinstance(loss, words.ClipCovLoss):
        return None
    band = loss

    def select(logprob_N: Tensor, start_N: Tensor, advantage_N: Tensor, seed: int) -> Tensor:
        return losses.clip_cov_selection(
            losses.covariance(logprob_N, advantage_N),
            losses.clipped(logprob_N, start_N, advantage_N, low=band.clip_low, high=band.clip_high),
            fraction=band.fraction,
            low=band.covariance_low,
            high=band.covariance_high,
            generator=torch.Generator().manual_seed(seed),
        )

    return select


def build_correction(correction: words.CorrectionConfig) -> Correction:
    """The importance weight of a token's loss, and which tokens are left out."""
    level = correction.level

    def correct(log_ratio_N: Tensor, segment_N: Tensor, num_segments: int) -> Tensor:
        weight_N = ratios.importance_weights(log_ratio_N, segment_N, num_segments, level=level)
        if correction.action == "truncate":
            weight_N = ratios.truncate(weight_N, high=correction.high)
        else:
            weight_N = ratios.icepop(weight_N, low=correction.low, high=correction.high)
        if correction.normalise:
            weight_N = ratios.normalise(weight_N, segment_N, num_segments, level=level)
        if correction.reject is not None:
            reject = correction.reject
            keep_N = ratios.rejection(
                log_ratio_N,
                segment_N,
                num_segments,
                estimator=reject.estimator,
                level=reject.level,
                low=reject.low,
                high=reject.high,
            )
            weight_N = weight_N * keep_N
        return weight_N

    return correct


def build_bounded(correction: words.CorrectionConfig) -> Correction:
    """Which tokens' importance weight is above `high`, or below `low`, True where it is."""

    def bounded(log_ratio_N: Tensor, segment_N: Tensor, num_segments: int) -> Tensor:
        weight_N = ratios.importance_weights(log_ratio_N, segment_N, num_segments, level=correction.level)
        return (weight_N > correction.high) | (weight_N < correction.low)

    return bounded


def _divergence(name: str) -> Divergence:
    estimators: dict[str, Divergence] = {
        "k1": kl.k1,
        "k2": kl.k2,
        "k3": kl.k3,
        "abs": kl.absolute,
        "k1+": kl.straight_through(kl.k1),
        "k3+": kl.straight_through(kl.k3),
    }
    return estimators[name]
