"""Comparison of two models on the same questions. Letters: N questions, G clusters of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, stdtr

from millrace.evaluation.intervals import LEVEL, cluster_sums, clustered_std_error, t_quantile

# The sign-flip test is made below so many clusters; above, it agrees with t.
PERMUTED = 200
# All sign patterns of so many clusters are enumerated.
ENUMERATED = 16
NUM_FLIPS = 20_000
POWER = 0.8


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """The mean difference of two models, A - B, over the same questions.

    Attributes:
        difference: the mean.
        std_error: its standard error, clustered; NaN with one cluster.
        low: lower end of the 95% interval.
        high: upper end.
        p_value: two-sided: of the sign-flip test with fewer than 200 clusters, of Student's t from there on.
        p_mcnemar: of McNemar's exact test; None unless each question has one answer that is right or wrong.
        detectable: the smallest true difference that so many questions show with a power of 0.8; NaN where
            all questions differ equally, or with one cluster.
        num_questions: that both answered.
        num_clusters: of these questions.
    """

    difference: float
    std_error: float
    low: float
    high: float
    p_value: float
    p_mcnemar: float | None
    detectable: float
    num_questions: int
    num_clusters: int


def compare_paired(
    a_N: Sequence[float] | np.ndarray,
    b_N: Sequence[float] | np.ndarray,
    cluster_N: Sequence[Hashable],
    *,
    is_single: bool = False,
    seed: int = 0,
) -> PairedComparison:
    """Compare two models question by question.

    Args:
        a_N: value of each question for A.
        b_N: the same for B, in the same order.
        cluster_N: cluster of each question.
        is_single: each value is 0 or 1, of one answer.
        seed: of the sign-flip test.

    Raises:
        ValueError: there are no questions, or the lengths differ.

    Source: Miller 2024, "Adding error bars to evals", sections 4 and 5.
    """
    a_N, b_N = np.asarray(a_N, dtype=float), np.asarray(b_N, dtype=float)
    if len(a_N) != len(b_N) or not len(a_N):
        raise ValueError(f"{len(a_N)} and {len(b_N)} questions cannot be paired")
    difference_N = a_N - b_N
    mean, std_error = float(difference_N.mean()), clustered_std_error(difference_N, cluster_N)
    sum_G = cluster_sums(difference_N, cluster_N)
    num_clusters = len(sum_G)
    mcnemar = None
    if is_single and num_clusters == len(a_N):
        mcnemar = mcnemar_exact(int((difference_N > 0).sum()), int((difference_N < 0).sum()))
    if num_clusters < 2:
        low = high = detectable = math.nan
    else:
        half = t_quantile((1 + LEVEL) / 2, num_clusters) * std_error
        low, high = mean - half, mean + half
        detectable = detectable_difference(std_error, num_clusters) if std_error else math.nan
    p_value = sign_flip(sum_G, seed=seed)
    if num_clusters >= PERMUTED:
        p_value = t_test(mean, std_error, num_clusters)
    return PairedComparison(mean, std_error, low, high, p_value, mcnemar, detectable, len(a_N), num_clusters)


def t_test(mean: float, std_error: float, num_clusters: int) -> float:
    """Compute the two-sided p-value of a mean with Student's t, G - 1 degrees of freedom."""
    if std_error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * float(stdtr(num_clusters - 1, -abs(mean) / std_error))


def sign_flip(sum_G: np.ndarray, *, seed: int) -> float:
    """Compute the two-sided p-value of a sum under random signs of its terms.

    Up to 16 terms that are not 0, all sign patterns count. With more, 20,000 random ones do, and the observed
    one besides, so that p is never 0.
    """
    sum_G = np.asarray(sum_G, dtype=float)
    sum_G = sum_G[sum_G != 0]
    # Sums of the same terms in another order differ by rounding.
    least = abs(float(sum_G.sum())) - 1e-9 * float(np.abs(sum_G).sum())
    if len(sum_G) <= ENUMERATED:
        total_P = np.zeros(1)
        for term in sum_G:
            total_P = np.concatenate([total_P + term, total_P - term])
        return float((np.abs(total_P) >= least).mean())
    sign_PG = np.random.default_rng(seed).integers(0, 2, size=(NUM_FLIPS, len(sum_G))) * 2 - 1
    return (1 + int((np.abs(sign_PG @ sum_G) >= least).sum())) / (1 + NUM_FLIPS)


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Compute the exact two-sided p-value of McNemar's test.

    Args:
        only_a: questions that A alone has right.
        only_b: questions that B alone has right.
    """
    return min(1.0, 2 * float(bdtr(min(only_a, only_b), only_a + only_b, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests by Holm's method; NaN stays and does not count.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    found, largest = list(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        found[i] = largest
    return found


def detectable_difference(std_error: float, num_clusters: int) -> float:
    """Compute (t_0.975 + t_0.8) * SE: the smallest true difference that a test of power 0.8 finds."""
    return (t_quantile((1 + LEVEL) / 2, num_clusters) + t_quantile(POWER, num_clusters)) * std_error
