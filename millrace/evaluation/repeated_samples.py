"""Estimates from several answers to a question: pass@k, pass^k, maj@k, and verl's best@N.

All functions take the answers to one question. `n` answers were scored, `c` of them are right; a subset of
k answers is taken without replacement, so that every estimate is unbiased.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

# C(n, n / 2) of more answers is beyond a float.
MAX_SAMPLES = 1000


def powers_of_two(n: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to n; the k that are reported for n answers."""
    return tuple(2**i for i in range(n.bit_length()))


def pass_at_k(num_right: int, num_scored: int, k: int) -> float:
    """Compute 1 - C(n - c, k) / C(n, k): the chance that one of k answers is right.

    NaN if fewer than k answers were scored: nothing is known then.

    Source: Chen et al. 2021, "Evaluating large language models trained on code".
    """
    _check(num_right, num_scored, k)
    if num_scored < k:
        return math.nan
    return 1 - math.comb(num_scored - num_right, k) / math.comb(num_scored, k)


def pass_hat_k(num_right: int, num_scored: int, k: int) -> float:
    """Compute pass^k = C(c, k) / C(n, k): the chance that all of k answers are right.

    NaN if fewer than k answers were scored.

    Source: Yao et al. 2024, "tau-bench".
    """
    _check(num_right, num_scored, k)
    if num_scored < k:
        return math.nan
    return math.comb(num_right, k) / math.comb(num_scored, k)


def best_with_replacement(num_right: int, num_scored: int, k: int) -> float:
    """Compute 1 - (1 - c / n)^k, the mean of verl's bootstrap of best@k.

    verl resamples k of the n answers with replacement. A resample holds fewer than k different answers, so
    this is below pass@k, unless all answers or none are right.
    """
    _check(num_right, num_scored, k)
    return math.nan if num_scored == 0 else 1 - (1 - num_right / num_scored) ** k


def majority_at_k(predictions: Sequence[str], right: Sequence[bool], ks: Sequence[int]) -> list[float]:
    """Compute maj@k: the chance that the most frequent prediction among k answers is right.

    Predictions that are equally frequent are equally likely to be taken. A prediction counts as right by the
    fraction of its answers that are. The sum over all subsets is exact.

    Args:
        predictions: the normalised prediction of each scored answer.
        right: whether each is right.
        ks: sizes of subsets; NaN for one above the number of answers.

    Raises:
        ValueError: there are more than 1,000 answers, or the lengths differ.
    """
    if len(predictions) > MAX_SAMPLES:
        raise ValueError(f"maj@k is of at most {MAX_SAMPLES} answers to a question, not {len(predictions)}")
    counts = Counter(predictions)
    hits = Counter(name for name, hit in zip(predictions, right, strict=True) if hit)
    sizes = tuple(sorted(counts.values()))
    possible = [k for k in ks if 1 <= k <= len(predictions)]
    if not possible:
        return [math.nan] * len(ks)
    chance = _majority_chances(sizes, max(possible))
    return [
        sum(chance[size][k] * hits[name] / size for name, size in counts.items())
        if k in possible
        else math.nan
        for k in ks
    ]


@lru_cache(maxsize=10_000)
def _majority_chances(sizes: tuple[int, ...], most: int) -> dict[int, np.ndarray]:
    """Compute for a class of each size the chance that it is the majority of k answers, k = 0..most.

    A class that occurs v times in the subset wins with 1 / (t + 1) if no other occurs more often and t others
    occur v times. Subsets are counted by a polynomial: the exponent of x is the size, row t the ties.
    """
    total = sum(sizes)
    found = {size: np.zeros(most + 1) for size in sizes}
    for v in range(1, min(most, max(sizes)) + 1):
        # Classes with fewer than v answers can neither win nor tie.
        few = sum(size for size in sizes if size < v)
        large = Counter(size for size in sizes if size >= v)
        base = np.zeros((most // v, most - v + 1))
        base[0] = [math.comb(few, j) for j in range(most - v + 1)]
        for size in large:
            ways = base
            for other, count in (large - Counter([size])).items():
                for _ in range(count):
                    ways = _with_class(ways, other, v)
            shared = 1 / np.arange(1, len(ways) + 1)
            found[size][v:] += math.comb(size, v) * (shared @ ways)
    subsets = np.array([math.comb(total, k) for k in range(most + 1)], dtype=float)
    return {size: ways / subsets for size, ways in found.items()}


def _with_class(ways: np.ndarray, size: int, v: int) -> np.ndarray:
    """Multiply by the polynomial of one more class, which occurs at most v times; v times is a tie."""
    width = ways.shape[1]
    found = ways.copy()
    for j in range(1, min(v, width)):
        found[:, j:] += math.comb(size, j) * ways[:, : width - j]
    if v < width:
        found[1:, v:] += math.comb(size, v) * ways[:-1, : width - v]
    return found


def _check(num_right: int, num_scored: int, k: int) -> None:
    if not 0 <= num_right <= num_scored:
        raise ValueError(f"{num_right} of {num_scored} answers cannot be right")
    if k < 1:
        raise ValueError(f"k is {k}; it must be 1 or more")
