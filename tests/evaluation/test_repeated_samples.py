"""pass@k, pass^k and maj@k against all subsets; verl's best@N and its bias."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import scipy.stats

from millrace.evaluation.repeated_samples import (
    best_with_replacement,
    majority_at_k,
    pass_at_k,
    pass_hat_k,
    powers_of_two,
)
from tests.close import close_fp64
from tests.house.source import ROOT


def over_subsets(predictions, right, k):
    """pass@k, pass^k and maj@k by enumeration of every subset."""
    hits, names = Counter(), Counter(predictions)
    for name, hit in zip(predictions, right, strict=True):
        hits[name] += hit
    any_right, all_right, majority = [], [], []
    for chosen in itertools.combinations(range(len(right)), k):
        any_right.append(any(right[i] for i in chosen))
        all_right.append(all(right[i] for i in chosen))
        votes = Counter(predictions[i] for i in chosen)
        most = max(votes.values())
        winners = [name for name, count in votes.items() if count == most]
        majority.append(sum(hits[name] / names[name] for name in winners) / len(winners))
    return [sum(each) / len(each) for each in (any_right, all_right, majority)]


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize("seed", range(20))
def test_estimates_equal_the_mean_over_all_subsets(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    predictions = [rng.choice("abcde"[: rng.randint(1, 5)]) for _ in range(n)]
    # With several answers of one prediction that are not all right, as a coarse normalisation gives.
    right = [rng.random() < (0.8 if name == "a" else 0.2) for name in predictions]
    votes = majority_at_k(predictions, right, range(1, n + 2))
    for k in range(1, n + 1):
        found = [pass_at_k(sum(right), n, k), pass_hat_k(sum(right), n, k), votes[k - 1]]
        close_fp64(found, over_subsets(predictions, right, k))
        others = scipy.stats.hypergeom(n, sum(right), k)
        close_fp64(found[:2], [1 - others.pmf(0), others.pmf(k)])
    # One scored answer too few: unknown, not 1.
    assert math.isnan(votes[n]) and math.isnan(pass_at_k(sum(right), n, n + 1))
    assert math.isnan(pass_hat_k(sum(right), n, n + 1))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("sizes", [(500, 300, 200), (1,) * 64, tuple(range(1, 23))])
def test_the_majority_of_many_answers_agrees_with_sampled_subsets(sizes):
    predictions = [str(number) for number, size in enumerate(sizes) for _ in range(size)]
    right = [name == "0" for name in predictions]
    rng, k, count = np.random.default_rng(0), 16, 500
    (found,) = majority_at_k(predictions, right, [k])
    won = []
    for _ in range(count):
        votes = Counter(predictions[i] for i in rng.choice(len(right), k, replace=False))
        most = max(votes.values())
        won.append((votes["0"] == most) / sum(value == most for value in votes.values()))
    assert abs(found - np.mean(won)) < 4 * max(0.02, np.std(won)) / math.sqrt(count)


def verl_best_at_n(values: list[float], n: int) -> float:
    """verl's bootstrap (trainer/ppo/metric_utils.py): 1,000 resamples with replacement, seed 42."""
    rng = np.random.RandomState(42)
    return float(np.mean([max(values[i] for i in rng.choice(len(values), n)) for _ in range(1000)]))


@pytest.mark.parametrize(("n", "c", "k"), [(8, 4, 4), (16, 2, 8), (64, 3, 32)])
def test_verls_best_at_n_is_below_pass_at_k(n, c, k):
    found = verl_best_at_n([1.0] * c + [0.0] * (n - c), k)
    mean = best_with_replacement(c, n, k)
    assert abs(found - mean) < 4 * math.sqrt(mean * (1 - mean) / 1000)
    exact = pass_at_k(c, n, k)
    assert exact - mean > 0.04
    # The page has these numbers.
    row = f"| {n} | {c} | {k} | {exact:.4f} | {mean:.4f} | {mean - exact:+.4f} |"
    assert row in (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="5 of 4 answers cannot be right"):
        pass_at_k(5, 4, 1)
    with pytest.raises(ValueError, match="k is 0; it must be 1 or more"):
        pass_hat_k(1, 4, 0)
    with pytest.raises(ValueError, match="at most 1000 answers to a question, not 1001"):
        majority_at_k(["a"] * 1001, [True] * 1001, [2])
    assert powers_of_two(9) == (1, 2, 4, 8)
