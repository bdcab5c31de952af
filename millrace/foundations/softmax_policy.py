"""The tabular softmax policy pi(a | s) = exp(logit(s, a)) / sum_b exp(logit(s, b)), and its exact gradient.

S = states, A = actions, H = steps of a finite horizon. Logits that are not finite raise ValueError.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.foundations.mdp import Floats, Mdp, check_finite, check_shape
from millrace.foundations.occupancy import occupancy, occupancy_by_step
from millrace.foundations.solve import action_values, evaluate, evaluate_by_step


def softmax(logit_SA: Any) -> Floats:
    """Probabilities along the last axis."""
    logit_SA = np.asarray(logit_SA, dtype=np.float64)
    check_finite(logit_SA, "logit_SA")
    # The largest exponent is 0, so nothing overflows.
    power_SA = np.exp(logit_SA - logit_SA.max(axis=-1, keepdims=True))
    return np.asarray(power_SA / power_SA.sum(axis=-1, keepdims=True))


def score(policy_SA: Floats) -> Floats:
    """Gradient of log pi(a | s) with respect to the logits of s: [a = b] - pi(b | s), [S, A, A].

    Other states' logits have no part in it.
    """
    return np.eye(policy_SA.shape[-1]) - policy_SA[..., None, :]


def policy_gradient(mdp: Mdp, logit_SA: Any) -> Floats:
    """Gradient [S, A] of the expected return with respect to the logits, by the policy gradient theorem.

    sum_t gamma^t p(s_t = s) pi(a | s) (q_t(s, a) - v_t(s)); with a horizon the same logits serve every step.
    Source: Sutton et al. 2000, "Policy gradient methods with function approximation".
    """
    policy_SA = softmax(logit_SA)
    check_shape(policy_SA, mdp.reward_SA.shape, "logit_SA")
    if mdp.horizon is None:
        value_S = evaluate(mdp, policy_SA)
        return occupancy(mdp, policy_SA) * (action_values(mdp, value_S) - value_S[:, None])
    value_HS = evaluate_by_step(mdp, policy_SA)
    gradient_SA = np.zeros(policy_SA.shape)
    for step, taken_SA in enumerate(occupancy_by_step(mdp, policy_SA)):
        advantage_SA = action_values(mdp, value_HS[step + 1]) - value_HS[step][:, None]
        gradient_SA += mdp.discount**step * taken_SA * advantage_SA
    return gradient_SA
