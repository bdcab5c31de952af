"""The algorithm of a recipe: its sections as functions of `algorithms` and `training.estimate`.

A section's `kind` and values are passed on as they are; the functions look the kind up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from millrace.algorithms import kl, losses, ratios
from millrace.algorithms.losses import PolicyLoss
from millrace.algorithms.ratios import Correction
from millrace.algorithms.weights import token_weights
from millrace.config import method_sections as words
from millrace.config.reward_sections import RewardConfig
from millrace.config.section import is_function
from millrace.config.sections import EIGHT_BIT, OptimizerConfig, PolicyConfig
from millrace.config.settings import RunConfig
from millrace.data.packing import TokenWeights
from millrace.kernels.dispatch import Scan
from millrace.models.adapters import trained_weights
from millrace.models.load import Model
from millrace.rollout.group_filter import REWARD, EqualNumbers, FilterPlugin, GroupFilter
from millrace.rollout.sampled_batch import is_equal
from millrace.run.train_step import Method
from millrace.training.estimate import Estimator, estimate_advantages
from millrace.training.kl_control import KlControl
from millrace.training.muon import muon
from millrace.training.optimizer import WeightOptimizer, adamw, check_eight_bit, weight_groups
from millrace.training.optimizer_plugin import OptimizerPlugin
from millrace.training.policy import KlPenalty, PolicyObjective
from millrace.training.schedule import linear
from millrace.training.tensor_plugins import AdvantagePlugin, CorrectionPlugin, LossPlugin

# Settings of an advantage that act outside of the estimator.
ELSEWHERE = {"path", "bootstrap_truncated"}


def build_method(config: RunConfig) -> Method:
    """Return the arithmetic of a recipe, apart from models and optimizers."""
    policy, advantage, loss = config.policy, config.advantage, config.policy.loss
    in_loss = policy.kl is not None and policy.kl.place == "loss"
    bonus = bool(policy.entropy_coefficient or policy.entropy_coefficient_final)
    held = in_loss or bonus or isinstance(loss, words.DroLoss | words.KlCovLoss)
    held = held or isinstance(loss, words.FunctionLoss)
    # A segment without an advantage is balanced all the same.
    held = held or policy.router_aux_coefficient > 0
    correction, bounded = build_correction(policy.correction)
    recomputes = policy.proximal == "recompute"
    selects = isinstance(loss, words.ClipCovLoss | words.KlCovLoss)
    in_reward = policy.kl is not None and policy.kl.place == "reward"
    return Method(
        estimator=build_estimator(advantage, config.rewards),
        token_weights=build_token_weights(
            policy.loss_aggregation, config.precision, length=config.rollout.max_tokens
        ),
        num_parts=policy.optimizer_steps_per_batch,
        num_epochs=policy.epochs_per_batch,
        shuffled=policy.shuffle_minibatches,
        truncated=policy.truncated_answers,
        recompute=recomputes,
        correction=correction if recomputes else None,
        bounded=bounded if recomputes else None,
        selection=partial(losses.token_selection, **loss.model_dump()) if selects else None,
        drop_selected=isinstance(loss, words.ClipCovLoss),
        multiple=not held,
        reward_divergence=kl.divergence(policy.kl.estimator) if policy.kl and in_reward else None,
        squares=advantage.kind == "token_baseline",
        greedy_baseline=advantage.kind == "greedy_baseline",
        bootstrap_truncated=isinstance(advantage, words.GaeAdvantage) and advantage.bootstrap_truncated,
        turn_index=isinstance(advantage, words.TURN_SECTIONS) and advantage.credit == "turn_index",
        max_tokens=config.rollout.max_tokens,
        overlong_tokens=config.rollout.overlong_tokens,
        overlong_penalty=config.rollout.overlong_penalty,
    )


def build_estimator(
    advantage: words.AdvantageConfig, rewards: Sequence[RewardConfig], scan: Scan = "auto"
) -> Estimator:
    """Return the advantage estimator of a recipe."""
    if isinstance(advantage, words.FunctionAdvantage):
        return AdvantagePlugin(advantage.function, advantage.options)
    settings = advantage.model_dump(exclude=ELSEWHERE)
    if advantage.kind == "group_decoupled":
        settings["weights"] = [reward.weight for reward in rewards]
    return partial(estimate_advantages, scan=scan, **settings)


def build_objective(policy: PolicyConfig, control: KlControl | None, num_batches: int) -> PolicyObjective:
    """Return the policy's objective.

    Args:
        policy: its section.
        control: of the KL penalty, if the recipe has one.
        num_batches: of the run, at the end of which the entropy coefficient has its final value.
    """
    penalty, last = None, policy.entropy_coefficient_final
    total_steps = num_batches * policy.optimizer_steps_per_batch * policy.epochs_per_batch
    bonus = partial(linear, first=policy.entropy_coefficient, last=last or 0.0, total_steps=total_steps)
    if policy.kl is not None and policy.kl.place == "loss" and control is not None:
        full = policy.kl.estimator == "full"
        penalty = KlPenalty(control, None if full else kl.divergence(policy.kl.estimator))
    recomputes = policy.proximal == "recompute"
    correction, bounded = (None, None) if recomputes else build_correction(policy.correction)
    return PolicyObjective(
        build_loss(policy.loss),
        interpolate=policy.proximal == "interpolate",
        correction=correction,
        bounded=bounded,
        entropy_coefficient=policy.entropy_coefficient if last is None else bonus,
        penalty=penalty,
    )


def build_optimizer(options: OptimizerConfig, model: Model) -> WeightOptimizer:
    """Return the optimizer of a policy's trained weights.

    Raises:
        SetupError: it is a function that cannot be called, or that returns no optimizer of these weights.
        ModelError: there is no weight for it.
    """
    weights, decay = trained_weights(model), options.weight_decay
    if options.kind == "muon":
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        apart = [weight for module in ends if module is not None for weight in module.parameters()]
        return muon(weights, apart, betas=options.betas, weight_decay=decay)
    if is_function(options.kind):
        groups = weight_groups(weights, decay)
        return OptimizerPlugin(options.kind, groups, betas=options.betas, weight_decay=decay)
    return adamw(weights, betas=options.betas, weight_decay=decay, eight_bit=options.kind == EIGHT_BIT)


def build_loss(loss: words.LossConfig) -> PolicyLoss | LossPlugin:
    """Return the policy loss of a section; SetupError if it names a function that cannot be called."""
    if isinstance(loss, words.FunctionLoss):
        return LossPlugin(loss.function, loss.options)
    return PolicyLoss(loss.kind, loss.model_dump(exclude={"kind"}))


def build_correction(
    correction: words.CorrectionConfig | None,
) -> tuple[Correction | None, Correction | None]:
    """Return the factor of a token's loss, and which tokens its bounds change; None where there is none.

    Raises:
        SetupError: it names a function that cannot be called.
    """
    if correction is None:
        return None, None
    if isinstance(correction, words.FunctionCorrection):
        return CorrectionPlugin(correction.function, correction.options), None
    weight = partial(ratios.correction, **correction.model_dump(exclude={"kind"}))
    if correction.action == "none":
        return _of_ratio(weight), None
    level, low, high = correction.level, correction.low, correction.high
    return _of_ratio(weight), _of_ratio(partial(ratios.out_of_bounds, level=level, low=low, high=high))


def _of_ratio(function: Callable[[Tensor, Tensor, int], Tensor]) -> Correction:
    """The same function of the log-probabilities whose difference is the log-ratio."""
    return lambda proximal_N, sampler_N, segment_N, num_segments: function(
        proximal_N - sampler_N, segment_N, num_segments
    )


def build_group_filter(rule: str) -> GroupFilter:
    """Return the filter of `rollout.group_filter`; SetupError if it is a function that cannot be called."""
    if is_function(rule):
        return FilterPlugin(rule)
    return is_equal if rule == REWARD else EqualNumbers(rule)


def check_policy(policy: PolicyConfig, model: Model) -> None:
    """Build what a policy is trained with, which is built again for each stage, so that it fails at once.

    Raises:
        SetupError: a plug-in cannot be called, or returns no optimizer of these weights.
        ModelError: there is no weight for the optimizer.
    """
    build_loss(policy.loss)
    build_correction(policy.correction)
    if policy.optimizer.kind == EIGHT_BIT:
        check_eight_bit(trained_weights(model))
    elif policy.optimizer.kind != "adamw":
        build_optimizer(policy.optimizer, model)


def build_control(penalty: words.KlConfig | None) -> KlControl | None:
    """Return the coefficient of a KL penalty; None without one."""
    if penalty is None:
        return None
    return KlControl(penalty.coefficient, target=penalty.target, horizon=penalty.horizon)


def build_token_weights(kind: str, precision: str, *, length: int = 0) -> TokenWeights:
    """Return the token weights of an optimizer step, in float64 where the policy's weights are.

    Args:
        kind: `loss_aggregation` of the section.
        precision: of the run.
        length: the constant that `fixed_length` divides by.
    """
    dtype = torch.float64 if precision == "float64" else torch.float32
    return partial(token_weights, kind=kind, length=length, dtype=dtype)
