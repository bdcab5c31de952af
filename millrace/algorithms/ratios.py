"""Importance weights, rejection and metrics for the mismatch of trainer and sampler log-probabilities.

T = packed tokens, here only sampled ones; segment_T = the segment of each, ids in [0, num_segments); B =
segments, of which some may have no token; N = chosen tokens. With x = log pi_trainer - log mu_sampler, before
the first update of a batch: 0 but for arithmetic, unless the batch is stale. Every function raises ValueError
for tensors of different shapes and for a setting outside its range; metrics, for no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from millrace.algorithms.checks import check_shapes, require
from millrace.algorithms.losses import MAX_LOG_RATIO
from millrace.algorithms.masked import segment_max, segment_mean, segment_sum

Level = Literal["token", "sequence", "geometric"]
Estimator = Literal["k1", "k2", "k3"]
Reduction = Literal["token", "sum", "mean", "max"]
# Log-probabilities of proximal and sampler [N], segment [N], number of segments -> a value of each token [N].
Correction = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def correction(
    log_ratio_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    level: Level,
    action: Literal["truncate", "mask", "none"],
    low: float,
    high: float,
    normalise: bool,
    reject: Mapping[str, Any] | None,
) -> Tensor:
    """Compute the factor of each token's loss that a recipe names, [T].

    The importance weight at `level`, bounded by `truncate` or by `icepop` ("mask"), then divided by its mean
    (`normalise`), and 0 for tokens that `rejection` with the settings `reject` leaves out. Before the
    rejection, action none has the weight 1.
    """
    weight_T = importance_weights(log_ratio_T, segment_T, num_segments, level=level)
    if action == "none":
        weight_T = torch.ones_like(weight_T)
    else:
        truncates = action == "truncate"
        weight_T = truncate(weight_T, high=high) if truncates else icepop(weight_T, low=low, high=high)
    if normalise:
        weight_T = divide_by_mean(weight_T, segment_T, num_segments, level=level)
    if reject is not None:
        weight_T = weight_T * rejection(log_ratio_T, segment_T, num_segments, **reject)
    return weight_T


def out_of_bounds(
    log_ratio_T: Tensor, segment_T: Tensor, num_segments: int, *, level: Level, low: float, high: float
) -> Tensor:
    """Find the tokens whose importance weight is above `high` or below `low`, bool [T]."""
    weight_T = importance_weights(log_ratio_T, segment_T, num_segments, level=level)
    return (weight_T > high) | (weight_T < low)


def importance_weights(log_ratio_T: Tensor, segment_T: Tensor, num_segments: int, *, level: Level) -> Tensor:
    """Importance weights [T]: exp(x), x clamped to +-20, without gradient.

    level: token: x of the token. sequence: its sum over the segment, the exact weight of a sequence.
    geometric: its mean over the segment. The last two are one number per segment, broadcast to its tokens.
    Source: token and sequence as in verl's rollout correction; geometric as in GSPO.
    """
    require(level in get_args(Level), "level", level, f"one of {', '.join(get_args(Level))}")
    how: Reduction = "token" if level == "token" else "sum" if level == "sequence" else "mean"
    return _bounded(_spread(log_ratio_T.detach(), segment_T, num_segments, how)).exp()


def truncate(w_T: Tensor, *, high: float) -> Tensor:
    """min(w, high): truncated importance sampling (TIS); high > 0."""
    require(high > 0, "high", high, "above 0")
    return w_T.clamp(max=high)


def icepop(w_T: Tensor, *, low: float, high: float) -> Tensor:
    """Keep w where low <= w <= high, else 0: tokens far off-policy are masked. low 0 masks above only.

    Source: Ling team 2025, "Every step evolves" (IcePop); masked importance sampling is the same.
    """
    require(0 <= low < high, "low", low, f"at least 0 and below high, which is {high}")
    return w_T * ((w_T >= low) & (w_T <= high))


def divide_by_mean(w_T: Tensor, segment_T: Tensor, num_segments: int, *, level: Level) -> Tensor:
    """Divide by the mean weight: over tokens, or over segments where a segment has one weight.

    Pass the whole optimizer step. Weights that are all 0 stay 0. verl's `rollout_is_batch_normalize`, which
    is applied after truncation.
    """
    check_shapes(w_T=w_T, segment_T=segment_T)
    require(level in get_args(Level), "level", level, f"one of {', '.join(get_args(Level))}")
    if level != "token":
        mean_B = segment_mean(w_T, segment_T, num_segments)
        mean = mean_B.sum() / len(segment_T.unique())
    else:
        mean = w_T.mean()
    return w_T / mean.clamp(min=torch.finfo(w_T.dtype).tiny)


def rejection(
    log_ratio_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    estimator: Estimator,
    level: Reduction,
    low: float | None,
    high: float,
) -> Tensor:
    """Find the tokens to keep, bool [T]: their estimate of KL(mu || pi) is within the bounds.

    With x clamped to +-20: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x. At level token each token by itself; at
    sum, mean and max the segment, which is kept or left out whole. Bounds are inclusive; for k1 they are of
    the ratio mu / pi, low <= exp(k1) <= high, and low None is 1 / high. For k2 and k3, which are never
    negative, low is None. The largest k1 is refused: it loses the sign on one side.
    Source: verl's rollout correction.
    """
    require(estimator in get_args(Estimator), "estimator", estimator, "one of k1, k2, k3")
    require(level in get_args(Reduction), "level", level, "one of token, sum, mean, max")
    require(high > 0, "high", high, "above 0")
    x_T = _bounded(log_ratio_T.detach())
    if estimator == "k1":
        require(level != "max", "level", level, "token, sum or mean for k1, which has two bounds")
        low = 1 / high if low is None else low
        require(0 < low < high, "low", low, f"above 0 and below high, which is {high}")
        estimate_T = _spread(-x_T, segment_T, num_segments, level)
        return (estimate_T >= math.log(low)) & (estimate_T <= math.log(high))
    require(low is None, "low", low, f"None for {estimator}, which is never negative")
    estimate_T = 0.5 * x_T.square() if estimator == "k2" else _k3(x_T)
    return _spread(estimate_T, segment_T, num_segments, level) <= high


def effective_sample_size(w_T: Tensor) -> float:
    """(sum w)^2 / (T sum w^2): the effective fraction of the tokens.

    1 for equal weights, 1 / T where one token carries everything, 0 where all weights are 0.
    """
    if len(w_T) == 0:
        raise ValueError("the effective sample size of no tokens is not defined")
    w_T = w_T.double()
    square = w_T.square().mean()
    return float(w_T.mean().square() / square) if square > 0 else 0.0


def interpolated_proximal(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, version_T: Tensor, *, version: int
) -> Tensor:
    """The proximal log-probabilities without a forward pass, on the line from the sampler's to the policy's.

    log prox = log mu + (1 - 1 / lag) (log pi - log mu), lag = version - version_T: a token sampled
    one policy version ago (lag 1) has the sampler's, an old one nearly the policy's. Tokens of the
    current version have the sampler's, too.
    Source: AReaL's `loglinear`.
    """
    check_shapes(policy_logprob_T=policy_logprob_T, sampler_logprob_T=sampler_logprob_T, version_T=version_T)
    lag_T = (version - version_T).clamp(min=1).to(sampler_logprob_T.dtype)
    return sampler_logprob_T + (1 - 1 / lag_T) * (policy_logprob_T.detach() - sampler_logprob_T)


def mismatch(trainer_logprob_N: Tensor, sampler_logprob_N: Tensor) -> dict[str, float]:
    """k1 = mean(-x) and k3 = mean(e^x - 1 - x), estimates of KL(mu || pi), and mean and largest |x|.

    All are 0 for equal weights and equal arithmetic; rounding alone leaves about 1e-7 in float32.
    """
    check_shapes(trainer_logprob_N=trainer_logprob_N, sampler_logprob_N=sampler_logprob_N)
    if trainer_logprob_N.numel() == 0:
        raise ValueError("mismatch of no tokens is not defined")
    difference_N = (trainer_logprob_N - sampler_logprob_N).double()
    return {
        "k1": float(-difference_N.mean()),
        "k3": float(_k3(difference_N).mean()),
        "mean": float(difference_N.abs().mean()),
        "max": float(difference_N.abs().max()),
    }


def typical(x_N: Tensor) -> float:
    """Mean of |x| without the largest hundredth, and without the largest of 2 to 199.

    Mixture-of-experts routers that break a near tie differently change few tokens by much. Wrong weights or
    wrong arithmetic change nearly all.
    """
    if len(x_N) == 0:
        raise ValueError("the typical difference of no tokens is not defined")
    left_out = max(len(x_N) // 100, int(len(x_N) > 1))
    return float(x_N.double().abs().sort().values[: len(x_N) - left_out].mean())


def mismatch_metrics(
    trainer_logprob_N: Tensor, sampler_logprob_N: Tensor, segment_N: Tensor, num_segments: int
) -> dict[str, float]:
    """`mismatch` and the rest of what verl reports.

    perplexity_trainer, perplexity_sampler: exp(-mean log-probability), mean over segments.
    perplexity_ratio: trainer / sampler for each segment, mean over segments.
    chi_square_token: mean(e^2x) - 1, an estimate of chi^2(pi || mu).
    chi_square_sequence: likewise with the sum of x over each segment, mean over segments.
    ess: `effective_sample_size` of the weights e^x.
    Segments without a token count for nothing; x is clamped to +-20 in the last three.
    """
    found = mismatch(trainer_logprob_N, sampler_logprob_N)
    check_shapes(trainer_logprob_N=trainer_logprob_N, segment_N=segment_N)
    present_B = segment_N.unique()
    trainer_N, sampler_N = trainer_logprob_N.double(), sampler_logprob_N.double()
    trainer_B = segment_mean(trainer_N, segment_N, num_segments)[present_B]
    sampler_B = segment_mean(sampler_N, segment_N, num_segments)[present_B]
    difference_N = trainer_N - sampler_N
    total_B = segment_sum(difference_N, segment_N, num_segments)[present_B]
    return found | {
        "perplexity_trainer": float((-trainer_B).exp().mean()),
        "perplexity_sampler": float((-sampler_B).exp().mean()),
        "perplexity_ratio": float((sampler_B - trainer_B).exp().mean()),
        "chi_square_token": _chi_square(difference_N),
        "chi_square_sequence": _chi_square(total_B),
        "ess": effective_sample_size(_bounded(difference_N).exp()),
    }


def _bounded(x_T: Tensor) -> Tensor:
    return x_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(x_T: Tensor) -> Tensor:
    return x_T.expm1() - x_T


def _chi_square(x_T: Tensor) -> float:
    return float((2 * _bounded(x_T)).exp().mean() - 1)


def _spread(x_T: Tensor, segment_T: Tensor, num_segments: int, how: Reduction) -> Tensor:
    check_shapes(log_ratio_T=x_T, segment_T=segment_T)
    if how == "token":
        return x_T
    reduce = {"sum": segment_sum, "mean": segment_mean, "max": segment_max}[how]
    return reduce(x_T, segment_T, num_segments)[segment_T]
