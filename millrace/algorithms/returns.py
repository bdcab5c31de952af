"""Returns and advantages over time, on the chosen tokens of a packed row.

T = chosen tokens, segment after segment, B = segments; `length_B` holds the tokens of each, zeros allowed.
V_t = `value_T` is the value of the state in which token t was chosen. After the last token of a segment V is
`bootstrap_B`, the value of the state it was cut off in, or 0 where the episode ended. No
gradient is computed. `scan` names the implementation of the recurrence; all agree.

Every function raises ValueError if gamma or lam is outside [0, 1], lengths do not add up, shapes differ
or a number is NaN or infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.checks import check_finite, check_lengths, check_positive, check_shapes, require
from millrace.algorithms.masked import goes_on
from millrace.kernels import dispatch
from millrace.kernels.dispatch import Scan


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    length_B: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap_B: Tensor | None = None,
    scan: Scan = "auto",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (A, A + V), each [T].

    A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t. lam, one number or one per
    segment [B], = 0 is the one-step error, = 1 the return less the value. A policy and a critic that want a
    lam each (VAPO) take the advantage of one call and the return of another.
    Source: Schulman et al. 2016, "High-dimensional continuous control" (GAE).
    """
    check_finite(reward_T=reward_T, value_T=value_T, bootstrap_B=bootstrap_B)
    return dispatch.gae(reward_T, value_T, length_B, gamma=gamma, lam=lam, bootstrap_B=bootstrap_B, scan=scan)


def discounted_returns(
    reward_T: Tensor,
    length_B: Tensor,
    *,
    gamma: float,
    bootstrap_B: Tensor | None = None,
    scan: Scan = "auto",
) -> Tensor:
    """R_t = r_t + gamma R_{t+1}, and after the last token the bootstrap value or 0: Monte Carlo, [T]."""
    no_value_T = torch.zeros_like(reward_T)
    _, return_T = gae(
        reward_T, no_value_T, length_B, gamma=gamma, lam=1.0, bootstrap_B=bootstrap_B, scan=scan
    )
    return return_T


def td_lambda_returns(
    reward_T: Tensor,
    value_T: Tensor,
    length_B: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap_B: Tensor | None = None,
    scan: Scan = "auto",
) -> Tensor:
    """G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}), [T]: A + V of `gae`.

    The mean of all n-step returns, weighing (1 - lam) lam^(n-1) each.
    Source: Sutton and Barto 2018, "Reinforcement learning", chapter 12.
    """
    _, return_T = gae(reward_T, value_T, length_B, gamma=gamma, lam=lam, bootstrap_B=bootstrap_B, scan=scan)
    return return_T


def n_step_returns(
    reward_T: Tensor,
    value_T: Tensor,
    length_B: Tensor,
    *,
    gamma: float,
    num_steps: int,
    bootstrap_B: Tensor | None = None,
    scan: Scan = "auto",
) -> Tensor:
    """G_t = r_t + gamma r_{t+1} + ... + gamma^n V_{t+n}, [T], n = num_steps, at least 1.

    Where the segment ends sooner the whole return. Found as R_t + gamma^n (V_{t+n} - R_{t+n}) from the
    discounted returns R, in the same time for every n; in float64, because R may be far larger than G.
    Source: Sutton and Barto 2018, "Reinforcement learning", chapter 7.
    """
    check_positive(num_steps=num_steps)
    check_shapes(reward_T=reward_T, value_T=value_T)
    check_finite(value_T=value_T)
    cut_B = None if bootstrap_B is None else bootstrap_B.double()
    return_T = discounted_returns(reward_T.double(), length_B, gamma=gamma, bootstrap_B=cut_B, scan=scan)
    beyond_T = torch.where(goes_on(length_B, num_steps), (value_T - return_T).roll(-num_steps), 0.0)
    return (return_T + gamma**num_steps * beyond_T).to(reward_T.dtype)


def v_trace(
    reward_T: Tensor,
    value_T: Tensor,
    log_ratio_T: Tensor,
    length_B: Tensor,
    *,
    gamma: float,
    lam: float = 1.0,
    max_rho: float = 1.0,
    max_c: float = 1.0,
    bootstrap_B: Tensor | None = None,
    scan: Scan = "auto",
) -> tuple[Tensor, Tensor]:
    """V-trace targets for off-policy tokens: (advantage, v), each [T].

    With x = log_ratio_T = log(pi / mu), rho_t = min(max_rho, e^x) and c_t = lam min(max_c, e^x):
    v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1}),
    A_t = rho_t (r_t + gamma ((1 - lam) V_{t+1} + lam v_{t+1}) - V_t).
    The advantage holds the weight rho already. Where pi = mu both are those of `gae`. The paper has no lam in
    A; for lam = 1 there is no difference. max_rho, which may be infinite, sets which policy v evaluates;
    max_c, above 0 and at most max_rho, decides speed and variance.
    Source: Espeholt et al. 2018, "IMPALA".
    """
    require(0 <= lam <= 1, "lam", lam, "in [0, 1]")
    check_positive(max_c=max_c)
    require(max_rho >= max_c, "max_rho", max_rho, f"at least max_c, which is {max_c}")
    check_shapes(reward_T=reward_T, log_ratio_T=log_ratio_T)
    check_finite(log_ratio_T=log_ratio_T)
    error_T, _ = gae(reward_T, value_T, length_B, gamma=gamma, lam=0.0, bootstrap_B=bootstrap_B, scan=scan)
    ratio_T = log_ratio_T.exp().to(error_T.dtype)
    rho_T, c_T = ratio_T.clamp(max=max_rho), ratio_T.clamp(max=max_c)
    inside_T = goes_on(length_B, 1)
    own_T = rho_T * error_T
    correction_T = dispatch.linear_scan(own_T, gamma * lam * c_T * inside_T, scan=scan)
    advantage_T = own_T + gamma * lam * rho_T * inside_T * correction_T.roll(-1)
    return advantage_T, value_T + correction_T


def length_adaptive_lambda(length_B: Tensor, *, alpha: float = 0.05) -> Tensor:
    """1 - 1 / (alpha l), not below 0, as the lam of a segment of l tokens; float64 [B]; alpha > 0.

    Long responses get a lam near 1, so that the reward at their end still reaches their beginning.
    Source: Yue et al. 2025, "VAPO".
    """
    check_positive(alpha=alpha)
    check_lengths(length_B=length_B)
    return (1 - 1 / (alpha * length_B.double())).clamp(min=0)
