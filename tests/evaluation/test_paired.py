"""Paired tests against enumeration and against scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from millrace.evaluation.paired import (
    compare_paired,
    detectable_difference,
    holm,
    mcnemar_exact,
    sign_flip,
    t_test,
)
from tests.close import close_fp64


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("seed", range(8))
def test_the_sign_flip_test_equals_the_enumeration_of_signs(seed):
    rng = np.random.default_rng(seed)
    # Multiples of 1/8, among them zeros and ties, as fractions of eight answers have.
    sum_G = rng.integers(-4, 6, 9) / 8
    observed = abs(sum_G.sum())
    signs = itertools.product((-1, 1), repeat=len(sum_G))
    expected = np.mean([abs(np.dot(sign, sum_G)) >= observed - 1e-12 for sign in signs])
    close_fp64(sign_flip(sum_G, seed=0), expected)
    scipys = scipy.stats.permutation_test(
        (sum_G,), np.sum, permutation_type="samples", n_resamples=math.inf, vectorized=False
    )
    close_fp64(sign_flip(sum_G, seed=0), scipys.pvalue)


def test_many_signs_are_sampled_and_agree_with_t():
    difference_N = np.random.default_rng(3).normal(0.1, 0.5, 150)
    found = compare_paired(difference_N, np.zeros(150), range(150))
    expected = scipy.stats.ttest_1samp(difference_N, 0.0)
    assert abs(found.p_value - expected.pvalue) < 0.01
    close_fp64(t_test(found.difference, found.std_error, 150), expected.pvalue)
    close_fp64([found.low, found.high], list(expected.confidence_interval()))
    large = compare_paired(np.tile(difference_N, 2), np.zeros(300), range(300))
    close_fp64(large.p_value, scipy.stats.ttest_1samp(np.tile(difference_N, 2), 0.0).pvalue)
    assert sign_flip(np.ones(40), seed=0) == 1 / 20_001


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (1, 0), (3, 9), (7, 7), (20, 4)])
def test_mcnemar_is_the_binomial_test_of_the_questions_that_differ(only_a, only_b):
    expected = scipy.stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    close_fp64(mcnemar_exact(only_a, only_b), expected)
    a_N, b_N = [1.0] * only_a + [0.0] * only_b + [1.0], [0.0] * only_a + [1.0] * only_b + [1.0]
    assert compare_paired(a_N, b_N, range(len(a_N)), is_single=True).p_mcnemar == mcnemar_exact(
        only_a, only_b
    )


@pytest.mark.parametrize("seed", range(5))
def test_holm_rejects_what_the_definition_rejects(seed):
    p_values = np.random.default_rng(seed).random(6) ** 3
    found = holm(p_values.tolist())
    for level in np.linspace(0.001, 0.999, 200):
        rejected: set[int] = set()
        for rank, i in enumerate(np.argsort(p_values)):
            if p_values[i] > level / (6 - rank):
                break
            rejected.add(int(i))
        assert {i for i, p in enumerate(found) if p <= level} == rejected
    assert holm([0.01, math.nan, 0.04])[::2] == [0.02, 0.04]


def test_clusters_flip_together_and_one_cluster_shows_nothing():
    a_N, b_N, cluster_N = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], ["p", "p", "p", "q"]
    found = compare_paired(a_N, b_N, cluster_N, is_single=True)
    assert (found.num_clusters, found.p_value, found.p_mcnemar) == (2, 1.0, None)
    alone = compare_paired([1.0], [0.0], ["p"])
    assert math.isnan(alone.low) and math.isnan(alone.detectable) and alone.p_value == 1.0
    assert math.isnan(compare_paired([1.0, 1.0], [0.5, 0.5], "pq").detectable)
    with pytest.raises(ValueError, match="1 and 2 questions cannot be paired"):
        compare_paired([1.0], [0.0, 1.0], ["p"])
    assert t_test(0.0, 0.0, 5) == 1.0 and t_test(0.5, 0.0, 5) == 0.0


def test_the_smallest_detectable_difference_is_found_four_times_in_five():
    """At a true difference of that size, 80% of the tests reject."""
    rng, num, deviation = np.random.default_rng(1), 40, 0.4
    true = detectable_difference(deviation / math.sqrt(num), num)
    p_values = scipy.stats.ttest_1samp(rng.normal(true, deviation, (4000, num)), 0.0, axis=1).pvalue
    assert abs((p_values < 0.05).mean() - 0.8) < 0.025
