"""Errors of a mean over questions against formulas of another package and against enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from millrace.evaluation.intervals import bootstrap, clustered_std_error, estimate_mean, wilson
from tests.close import close_fp64


def sandwich(value_N, cluster_N):
    """The cluster-robust error of a regression on a constant, with the factor G / (G - 1)."""
    x, residual_N = np.ones((len(value_N), 1)), value_N - value_N.mean()
    bread = np.linalg.inv(x.T @ x)
    meat = sum(
        np.outer(x[at].T @ residual_N[at], x[at].T @ residual_N[at])
        for at in (cluster_N == cluster for cluster in set(cluster_N))
    )
    count = len(set(cluster_N))
    return math.sqrt((bread @ meat @ bread)[0, 0] * count / (count - 1))


@pytest.mark.parametrize("seed", range(10))
def test_the_clustered_error_is_that_of_a_regression_and_alone_that_of_a_mean(seed):
    rng = np.random.default_rng(seed)
    value_N, cluster_N = rng.random(30), rng.integers(0, 7, 30)
    close_fp64(clustered_std_error(value_N, cluster_N.tolist()), sandwich(value_N, cluster_N))
    close_fp64(clustered_std_error(value_N, range(30)), scipy.stats.sem(value_N))
    found = estimate_mean(value_N, range(30), is_fraction=False)
    low, high = scipy.stats.t.interval(0.95, 29, loc=value_N.mean(), scale=scipy.stats.sem(value_N))
    close_fp64([found.low, found.high], [low, high])


def test_the_samples_of_a_question_are_its_cluster():
    """8 questions x 8 answers: the error over 64 answers is far too small."""
    right_QS = np.array([[1.0] * c + [0.0] * (8 - c) for c in (8, 8, 7, 8, 0, 1, 0, 2)])
    naive = scipy.stats.sem(right_QS.ravel())
    by_question = clustered_std_error(right_QS.mean(1), range(8))
    close_fp64(clustered_std_error(right_QS.ravel(), np.repeat(np.arange(8), 8).tolist()), by_question)
    assert by_question > 2.3 * naive


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (30, 30), (12, 30)])
def test_wilson(right, n):
    expected = scipy.stats.binomtest(right, n).proportion_ci(method="wilson")
    close_fp64(wilson(right, n), [expected.low, expected.high])


def test_the_bootstrap_of_two_clusters_has_three_means():
    assert bootstrap([0.0, 0.0, 1.0], ["a", "a", "b"], seed=1) == (0.0, 1.0)
    value_N = np.random.default_rng(2).random(60)
    low, high = bootstrap(value_N, range(60), seed=0)
    error = clustered_std_error(value_N, range(60))
    assert abs((high - low) / (2 * 1.96 * error) - 1) < 0.1
    assert bootstrap(value_N, range(60), seed=0) == (low, high)


def test_the_interval_fits_what_it_is_of():
    single = estimate_mean([1.0, 0.0, 0.0, 1.0], "abcd", is_single=True)
    assert single.method == "wilson"
    # Questions that do not vary are no proof of a rate of 1.
    sure = estimate_mean([1.0] * 30, range(30), resamples=True)
    assert (sure.method, sure.std_error, sure.high) == ("wilson", 0.0, 1.0) and sure.low < 0.9
    assert estimate_mean([0.5, 1.0, 0.25], "abc", resamples=True).method == "bootstrap"
    many = estimate_mean([0.0, 1.0] * 50, range(100), is_single=True)
    assert many.method == "t"
    one = estimate_mean([0.5, 0.25], "aa")
    assert one.num_clusters == 1 and math.isnan(one.std_error) and math.isnan(one.low)
    cut = estimate_mean([1.0, 0.5, 1.0], "abc")
    assert cut.high == 1.0
    with pytest.raises(ValueError, match="there are no questions"):
        estimate_mean([], [])
    with pytest.raises(ValueError, match="2 values have 1 clusters"):
        clustered_std_error([0.0, 1.0], "a")
    with pytest.raises(ValueError, match="3 of 2 cannot be right"):
        wilson(3, 2)
