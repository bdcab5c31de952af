"""The arithmetic of one optimizer step as a recipe asks for it, with log-probabilities and values given.

T = packed tokens, N = chosen tokens, B = answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.losses import value_loss
from millrace.config.settings import RunConfig
from millrace.data.batch import Batch
from millrace.run.build_algorithm import build_control, build_method, build_objective
from millrace.training.estimate import Scored
from tests.training.pieces import predicted


def estimated(
    config: RunConfig, batch: Batch, reward_B: Tensor, group_B: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Advantage of each token and what the critic learns, put back in the packed row."""
    scored = Scored(batch, reward_B, group_B, int(group_B.max()) + 1)
    advantage_N, return_N = build_method(config).estimator(scored)
    return scored.chosen.put(advantage_N), None if return_N is None else scored.chosen.put(return_N)


def policy_loss(config: RunConfig, batch: Batch, new_T: Tensor, old_T: Tensor) -> Tensor:
    """The loss of the policy's step for the batch's advantages, as `run.train_step` puts it together."""
    method, mask_T = build_method(config), batch.action_mask_T
    if method.recompute:
        batch.proximal_logprob_T = old_T
    if method.correction is not None:
        segment_N = batch.segment_T[mask_T]
        before = (old_T[mask_T], batch.sampler_logprob_T[mask_T])
        factor_N = method.correction(*before, segment_N, batch.num_segments)
        batch.correction_T = torch.ones_like(old_T).masked_scatter(mask_T, factor_N)
    loss_N, _ = build_objective(config.policy, build_control(config.policy.kl), config.steps)(
        predicted(new_T[mask_T]), batch
    )
    return (loss_N * method.token_weights(mask_T, batch.segment_T)[mask_T]).sum()


def critic_loss(config: RunConfig, batch: Batch, new_T: Tensor, return_T: Tensor) -> Tensor:
    """The loss of the critic's step."""
    assert config.critic is not None and batch.value_T is not None
    mask_T = batch.action_mask_T
    weight_T = build_method(config).token_weights(mask_T, batch.segment_T)
    clip, coefficient = config.critic.clip, config.critic.coefficient
    loss_N = value_loss(
        new_T[mask_T], batch.value_T[mask_T], return_T[mask_T], clip=clip, coefficient=coefficient
    )
    return (loss_N * weight_T[mask_T]).sum()
