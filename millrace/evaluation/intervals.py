"""Standard errors and 95% confidence intervals of a mean over questions.

Questions are the sample: several answers to one are its cluster, as are questions about one passage.
Letters: N items (questions), G clusters.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtrit

# Below so many questions, the interval of one answer to each is Wilson's.
SMALL = 100
NUM_RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over questions.

    Attributes:
        value: the mean.
        std_error: its standard error; NaN with one cluster.
        low: lower end of the 95% interval; NaN with one cluster.
        high: upper end.
        num_questions: questions in the mean.
        num_clusters: clusters in the error.
        method: of the interval.
    """

    value: float
    std_error: float
    low: float
    high: float
    num_questions: int
    num_clusters: int
    method: Literal["t", "wilson", "bootstrap"]


def clustered_std_error(value_N: Sequence[float] | np.ndarray, cluster_N: Sequence[Hashable]) -> float:
    """Compute sqrt(G / (G - 1) * sum_g (sum_{i in g} (s_i - m))^2) / N; NaN with one cluster.

    With one item in each cluster, it is sd / sqrt(N).

    Source: Miller 2024, "Adding error bars to evals", appendix A, with the correction for few clusters.
    """
    value_N = np.asarray(value_N, dtype=float)
    sum_G = cluster_sums(value_N - value_N.mean(), cluster_N)
    if len(sum_G) < 2:
        return math.nan
    return math.sqrt(len(sum_G) / (len(sum_G) - 1) * float(sum_G @ sum_G)) / len(value_N)


def cluster_sums(value_N: np.ndarray, cluster_N: Sequence[Hashable]) -> np.ndarray:
    """Sum the items of each cluster; clusters are in the order of their first items."""
    index: dict[Hashable, int] = {}
    number_N = [index.setdefault(cluster, len(index)) for cluster in cluster_N]
    if len(number_N) != len(value_N):
        raise ValueError(f"{len(value_N)} values have {len(number_N)} clusters; give one for each")
    return np.bincount(number_N, weights=value_N, minlength=len(index))


def t_quantile(p: float, num_clusters: int) -> float:
    """Compute the quantile of Student's t with G - 1 degrees of freedom."""
    return float(stdtrit(num_clusters - 1, p))


def wilson(num_right: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Compute Wilson's interval of a fraction of n independent trials.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if n < 1 or not 0 <= num_right <= n:
        raise ValueError(f"{num_right:g} of {n} cannot be right")
    z2, p = float(ndtri((1 + level) / 2)) ** 2, num_right / n
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At the ends of the range, where they are exact, they are not rounded.
    return 0.0 if num_right == 0 else middle - half, 1.0 if num_right == n else middle + half


def bootstrap(
    value_N: Sequence[float] | np.ndarray, cluster_N: Sequence[Hashable], *, seed: int
) -> tuple[float, float]:
    """Compute the percentile interval of the mean, with clusters resampled; the same for the same seed."""
    value_N = np.asarray(value_N, dtype=float)
    sum_G, size_G = cluster_sums(value_N, cluster_N), cluster_sums(np.ones(len(value_N)), cluster_N)
    times_RG = np.random.default_rng(seed).multinomial(
        len(sum_G), np.full(len(sum_G), 1 / len(sum_G)), size=NUM_RESAMPLES
    )
    mean_R = (times_RG @ sum_G) / (times_RG @ size_G)
    low, high = np.quantile(mean_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def estimate_mean(
    value_N: Sequence[float] | np.ndarray,
    cluster_N: Sequence[Hashable],
    *,
    is_fraction: bool = True,
    is_single: bool = False,
    resamples: bool = False,
    seed: int = 0,
) -> MeanEstimate:
    """Estimate the mean of a value per question, with its error.

    The interval is that of Student's t with G - 1 degrees of freedom, cut at 0 and 1 for a fraction. It is
    Wilson's for single right or wrong answers to less than 100 questions, and for a fraction where all
    questions have 0, or all have 1, so that they do not vary.

    Args:
        value_N: one value for each question.
        cluster_N: its cluster.
        is_fraction: the values are between 0 and 1.
        is_single: each value is 0 or 1, of one answer.
        resamples: use the percentile bootstrap instead of t.
        seed: of the bootstrap.

    Raises:
        ValueError: there are no values.
    """
    value_N = np.asarray(value_N, dtype=float)
    if not len(value_N):
        raise ValueError("there are no questions to take a mean over")
    num, num_clusters = len(value_N), len(set(cluster_N))
    mean, std_error = float(value_N.mean()), clustered_std_error(value_N, cluster_N)
    independent, constant = num_clusters == num, mean in (0.0, 1.0)
    if is_fraction and ((is_single and independent and num < SMALL) or constant):
        low, high = wilson(mean * num_clusters, num_clusters)
        return MeanEstimate(mean, std_error, low, high, num, num_clusters, "wilson")
    if num_clusters < 2:
        return MeanEstimate(mean, std_error, math.nan, math.nan, num, num_clusters, "t")
    if resamples:
        low, high = bootstrap(value_N, cluster_N, seed=seed)
        return MeanEstimate(mean, std_error, low, high, num, num_clusters, "bootstrap")
    half = t_quantile((1 + LEVEL) / 2, num_clusters) * std_error
    low, high = mean - half, mean + half
    if is_fraction:
        low, high = max(0.0, low), min(1.0, high)
    return MeanEstimate(mean, std_error, low, high, num, num_clusters, "t")
