from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.ratios import (
    Estimator,
    Level,
    Reduction,
    divide_by_mean,
    effective_sample_size,
    icepop,
    importance_weights,
    interpolated_proximal,
    mismatch,
    mismatch_metrics,
    rejection,
    truncate,
    typical,
)
from tests.close import close_fp32, close_fp64

LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


def random_row(seed: int) -> tuple[Tensor, Tensor, int]:
    """Log ratios, their segments, and how many there are; the second and the last segment are empty."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(1, 7, (6,), generator=generator)
    length_B[1] = length_B[5] = 0
    segment_T = torch.repeat_interleave(torch.arange(6), length_B)
    return 0.3 * torch.randn(len(segment_T), generator=generator, dtype=torch.float64), segment_T, 6


def by_segment(x_T: Tensor, segment_T: Tensor) -> list[list[float]]:
    return [x_T[segment_T == b].tolist() for b in segment_T.unique()]


def spread_loop(x_T: Tensor, segment_T: Tensor, how: str) -> list[float]:
    reduce: dict[str, Callable[[list[float]], list[float]]] = {
        "token": lambda x: x,
        "sum": lambda x: [sum(x)] * len(x),
        "mean": lambda x: [sum(x) / len(x)] * len(x),
        "max": lambda x: [max(x)] * len(x),
    }
    return [number for x in by_segment(x_T, segment_T) for number in reduce[how](x)]


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(20))
def test_importance_weights_equal_the_loop(seed: int) -> None:
    x_T, segment_T, num_segments = random_row(seed)
    for level, how in zip(LEVELS, ("token", "sum", "mean"), strict=True):
        found_T = importance_weights(x_T, segment_T, num_segments, level=level)
        close_fp64(found_T, [math.exp(x) for x in spread_loop(x_T, segment_T, how)])


def test_weights_are_bounded_after_the_reduction_and_have_no_gradient() -> None:
    x_T = torch.tensor([15.0, 10.0, -30.0, -60.0], dtype=torch.float64, requires_grad=True)
    segment_T = torch.tensor([0, 0, 2, 2])
    found = {level: importance_weights(x_T, segment_T, 3, level=level) for level in LEVELS}
    close_fp64(found["token"].log(), [15.0, 10.0, -20.0, -20.0])
    close_fp64(found["sequence"].log(), [20.0, 20.0, -20.0, -20.0])
    close_fp64(found["geometric"].log(), [12.5, 12.5, -20.0, -20.0])
    assert not any(w_T.requires_grad for w_T in found.values())


def test_truncation_and_icepop_by_hand() -> None:
    w_T = torch.tensor([0.25, 0.5, 1.5, 2.0, 3.0])
    assert truncate(w_T, high=2.0).tolist() == [0.25, 0.5, 1.5, 2.0, 2.0]
    assert icepop(w_T, low=0.5, high=2.0).tolist() == [0.0, 0.5, 1.5, 2.0, 0.0]
    assert icepop(w_T, low=0.0, high=0.5).tolist() == [0.25, 0.5, 0.0, 0.0, 0.0]
    assert truncate(w_T, high=0.5).tolist() == [0.25, 0.5, 0.5, 0.5, 0.5]


def test_icepop_does_not_hide_nan() -> None:
    assert icepop(torch.tensor([math.nan, 9.0]), low=0.5, high=2.0).isnan().tolist() == [True, False]


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(20))
def test_normalised_weights_have_mean_1_over_tokens_or_segments(seed: int) -> None:
    x_T, segment_T, num_segments = random_row(seed)
    w_T = x_T.exp()
    tokens = w_T.tolist()
    segments = [sum(x) / len(x) for x in by_segment(w_T, segment_T)]
    for level, numbers in zip(LEVELS, (tokens, segments, segments), strict=True):
        found_T = divide_by_mean(w_T, segment_T, num_segments, level=level)
        close_fp64(found_T, [x / (sum(numbers) / len(numbers)) for x in tokens])


def test_weights_that_are_all_0_stay_0() -> None:
    for level in LEVELS:
        assert divide_by_mean(torch.zeros(3), torch.tensor([0, 0, 1]), 2, level=level).tolist() == [0.0] * 3


COMBINATIONS = [
    (estimator, level)
    for estimator in ("k1", "k2", "k3")
    for level in ("token", "sum", "mean", "max")
    if (estimator, level) != ("k1", "max")
]


def statistic_loop(x_T: Tensor, segment_T: Tensor, estimator: str, how: str) -> list[float]:
    one: dict[str, Callable[[float], float]] = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }
    y_T = torch.tensor([one[estimator](x) for x in x_T.tolist()], dtype=torch.float64)
    return spread_loop(y_T, segment_T, how)


@pytest.mark.slow_beyond(33)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("estimator", "level"), COMBINATIONS)
def test_rejection_equals_the_loop(estimator: Estimator, level: Reduction, seed: int) -> None:
    x_T, segment_T, num_segments = random_row(seed)
    low, high = (0.9, 1.4) if estimator == "k1" else (None, 0.05)
    least, most = (math.log(0.9), math.log(1.4)) if estimator == "k1" else (0.0, 0.05)
    expected = [least <= x <= most for x in statistic_loop(x_T, segment_T, estimator, level)]
    found_T = rejection(x_T, segment_T, num_segments, estimator=estimator, level=level, low=low, high=high)
    assert found_T.tolist() == expected


def keep(x: list[float], estimator: Estimator, level: Reduction, **bounds: Any) -> list[bool]:
    segment_T = torch.zeros(len(x), dtype=torch.long)
    x_T = torch.tensor(x, dtype=torch.float64)
    return rejection(x_T, segment_T, 1, estimator=estimator, level=level, **bounds).tolist()


def test_the_bounds_of_k1_are_of_sampler_over_trainer_and_inclusive() -> None:
    # Trainer / sampler is e^x; the lower bound alone is 1 / high.
    x = [-math.log(2), math.log(2), math.log(0.4), math.log(2.4), 0.0]
    assert keep(x, "k1", "token", low=0.4, high=2.0) == [True, True, False, True, True]
    assert keep(x, "k1", "token", low=None, high=2.0) == [True, True, False, False, True]
    assert keep(x, "k1", "token", low=0.5, high=2.5) == [True, True, True, False, True]


def test_the_bound_of_k2_is_inclusive() -> None:
    assert keep([2.0, -2.0, 2.01], "k2", "token", low=None, high=2.0) == [True, True, False]


def test_one_far_token_is_bounded_before_it_is_summed() -> None:
    # 200 = 20^2 / 2, and the mean of two is 100.
    assert keep([50.0, 0.0], "k2", "sum", low=None, high=200.0) == [True, True]
    assert keep([-50.0, 0.0], "k2", "mean", low=None, high=99.9) == [False, False]
    assert keep([50.0, -20.0], "k1", "sum", low=None, high=1.01) == [True, True]


def test_the_largest_of_a_segment_decides_though_all_are_small() -> None:
    assert keep([0.1, 0.2], "k2", "max", low=None, high=0.0199) == [False, False]
    assert keep([0.1, 0.2], "k2", "max", low=None, high=0.0201) == [True, True]


def test_a_token_that_is_nan_is_not_kept() -> None:
    assert keep([math.nan, 0.1], "k3", "token", low=None, high=1.0) == [False, True]
    assert keep([math.nan, 0.1], "k1", "mean", low=None, high=2.0) == [False, False]


def test_the_effective_sample_size_by_hand() -> None:
    close_fp64(effective_sample_size(torch.tensor([0.5, 0.5, 0.5])), 1.0)
    close_fp64(effective_sample_size(torch.tensor([0.0, 3.0, 0.0, 0.0])), 0.25)
    close_fp64(effective_sample_size(torch.tensor([1.0, 2.0, 0.5])), 3.5**2 / (3 * 5.25))
    assert effective_sample_size(torch.zeros(3)) == 0.0


def test_the_proximal_lies_between_sampler_and_policy_by_version() -> None:
    policy_T = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    sampler_T = torch.full((6,), -3.0, dtype=torch.float64)
    version_T = torch.tensor([2, 3, 4, 5, 6, 7])
    found_T = interpolated_proximal(policy_T, sampler_T, version_T, version=6)
    # AReaL: (5 - v) / (6 - v) of the way from -3 to -1, never outside.
    close_fp64(found_T, [-3 + 2 * 3 / 4, -3 + 2 * 2 / 3, -2.0, -3.0, -3.0, -3.0])
    assert not found_T.requires_grad


def test_mismatch_by_hand() -> None:
    found = mismatch(torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -1.5, -1.0]))
    close_fp64(found["k1"], (-1.0 + 0.5 + 0.0) / 3)
    close_fp64(found["k3"], ((math.e - 2) + (math.exp(-0.5) - 0.5)) / 3)
    close_fp64(found["max"], 1.0)
    close_fp64(found["mean"], 0.5)


def test_the_largest_difference_has_no_sign() -> None:
    close_fp64(mismatch(torch.tensor([-3.0, 0.0]), torch.tensor([0.0, -1.0]))["max"], 3.0)


def test_equal_logprobs_have_no_mismatch() -> None:
    same_N, segment_N = torch.full((4,), -1.3), torch.tensor([0, 0, 2, 2])
    assert mismatch(same_N, same_N) == {"k1": 0.0, "k3": 0.0, "mean": 0.0, "max": 0.0}
    found = mismatch_metrics(same_N, same_N, segment_N, 3)
    close_fp64(
        [found["perplexity_ratio"], found["chi_square_token"], found["chi_square_sequence"]], [1, 0, 0]
    )


def test_k1_and_k3_are_the_divergence_in_the_mean() -> None:
    # Token i is drawn as often as the sampler's share of it says: 1/4, 1/4, 1/2.
    sampler_V = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    trainer_V = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    drawn_N = torch.tensor([0, 1, 2, 2])
    found = mismatch(trainer_V.log()[drawn_N], sampler_V.log()[drawn_N])
    divergence = float((sampler_V * (sampler_V / trainer_V).log()).sum())
    close_fp64([found["k1"], found["k3"]], [divergence, divergence])
    more = mismatch_metrics(trainer_V.log()[drawn_N], sampler_V.log()[drawn_N], torch.arange(4), 4)
    chi_square = float((trainer_V.square() / sampler_V).sum() - 1)
    close_fp64([more["chi_square_token"], more["chi_square_sequence"]], [chi_square, chi_square])


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(10))
def test_the_mismatch_metrics_equal_the_loop(seed: int) -> None:
    x_T, segment_T, num_segments = random_row(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    sampler_T = -torch.rand(len(x_T), generator=generator, dtype=torch.float64) - 0.1
    found = mismatch_metrics(sampler_T + x_T, sampler_T, segment_T, num_segments)

    def perplexities(logprob_T: Tensor) -> list[float]:
        return [math.exp(-sum(x) / len(x)) for x in by_segment(logprob_T, segment_T)]

    def mean(x: list[float]) -> float:
        return sum(x) / len(x)

    trainer, sampler = perplexities(sampler_T + x_T), perplexities(sampler_T)
    expected = {
        "perplexity_trainer": mean(trainer),
        "perplexity_sampler": mean(sampler),
        "perplexity_ratio": mean([t / s for t, s in zip(trainer, sampler, strict=True)]),
        "chi_square_token": mean([math.exp(2 * x) for x in x_T.tolist()]) - 1,
        "chi_square_sequence": mean([math.exp(2 * sum(x)) for x in by_segment(x_T, segment_T)]) - 1,
        "ess": mean([math.exp(x) for x in x_T.tolist()]) ** 2 / mean([math.exp(2 * x) for x in x_T.tolist()]),
    }
    expected |= mismatch(sampler_T + x_T, sampler_T)
    assert found.keys() == expected.keys()
    for name, number in expected.items():
        close_fp64(found[name], number)


def test_chi_square_is_of_log_ratios_up_to_20() -> None:
    found = mismatch_metrics(torch.tensor([0.0, 0.0]), torch.tensor([-30.0, -1.0]), torch.arange(2), 2)
    close_fp64(found["chi_square_token"], (math.exp(40) + math.exp(2)) / 2 - 1)
    expected = (math.exp(20) + math.exp(1)) ** 2 / (math.exp(40) + math.exp(2)) / 2
    close_fp64(found["ess"], expected)


def test_no_tokens_have_no_mismatch_and_no_sample_size_to_speak_of() -> None:
    with pytest.raises(ValueError, match="^mismatch of no tokens is not defined$"):
        mismatch(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="^the effective sample size of no tokens is not defined$"):
        effective_sample_size(torch.zeros(0))


ONE, FIRST = torch.ones(1), torch.zeros(1, dtype=torch.long)
THREE, TWO = torch.zeros(3), torch.zeros(2, dtype=torch.long)


def reject(**changed: Any) -> Tensor:
    sound: dict[str, Any] = {"estimator": "k1", "level": "token", "low": 0.5, "high": 2.0}
    return rejection(ONE, FIRST, 1, **(sound | changed))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: truncate(ONE, high=0.0), "high is 0.0; it must be above 0"),
    (
        lambda: icepop(ONE, low=-0.1, high=2.0),
        "low is -0.1; it must be at least 0 and below high, which is 2.0",
    ),
    (
        lambda: icepop(ONE, low=2.0, high=2.0),
        "low is 2.0; it must be at least 0 and below high, which is 2.0",
    ),
    (lambda: reject(high=0.0), "high is 0.0; it must be above 0"),
    (lambda: reject(low=0.0), "low is 0.0; it must be above 0 and below high, which is 2.0"),
    (lambda: reject(low=2.0), "low is 2.0; it must be above 0 and below high, which is 2.0"),
    (lambda: reject(low=None, high=0.8), "low is 1.25; it must be above 0 and below high, which is 0.8"),
    (lambda: reject(estimator="k3"), "low is 0.5; it must be None for k3, which is never negative"),
    (lambda: reject(level="max"), "level is max; it must be token, sum or mean for k1, which has two bounds"),
    (lambda: reject(level="row"), "level is row; it must be one of token, sum, mean, max"),
    (lambda: reject(estimator="k4"), "estimator is k4; it must be one of k1, k2, k3"),
    (
        lambda: importance_weights(ONE, FIRST, 1, level="row"),  # type: ignore[arg-type]
        "level is row; it must be one of token, sequence, geometric",
    ),
    (
        lambda: divide_by_mean(ONE, FIRST, 1, level="row"),  # type: ignore[arg-type]
        "level is row; it must be one of token, sequence, geometric",
    ),
    (
        lambda: importance_weights(THREE, TWO, 1, level="token"),
        "segment_T has shape (2,), but log_ratio_T (3,)",
    ),
    (lambda: divide_by_mean(THREE, TWO, 1, level="token"), "segment_T has shape (2,), but w_T (3,)"),
    (
        lambda: rejection(THREE, TWO, 1, estimator="k2", level="token", low=None, high=1.0),
        "segment_T has shape (2,), but log_ratio_T (3,)",
    ),
    (
        lambda: interpolated_proximal(THREE, ONE, THREE, version=1),
        "sampler_logprob_T has shape (1,), but policy_logprob_T (3,)",
    ),
    (
        lambda: interpolated_proximal(THREE, THREE, TWO, version=1),
        "version_T has shape (2,), but policy_logprob_T (3,)",
    ),
    (lambda: mismatch(THREE, ONE), "sampler_logprob_N has shape (1,), but trainer_logprob_N (3,)"),
    (
        lambda: mismatch_metrics(THREE, THREE, TWO, 1),
        "segment_N has shape (2,), but trainer_logprob_N (3,)",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()


def test_bounds_at_the_edge_are_taken() -> None:
    close_fp32(truncate(ONE, high=0.5), [0.5])
    close_fp32(icepop(ONE, low=0.0, high=0.5), [0.0])
    assert reject(estimator="k2", low=None, high=0.5).tolist() == [True]
    assert reject(low=0.3, high=0.4).tolist() == [True]  # e^-1 = 0.37


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([-3.0], 3.0),
        ([1.0, -9.0], 1.0),
        ([1.0] * 150 + [-99.0], 1.0),
        ([1.0] * 197 + [9.0] * 2, 206 / 198),
        ([1.0] * 198 + [9.0] * 2, 1.0),
        ([1.0, -2.0] * 150 + [9.0] * 3, 1.5),
    ],
)
def test_the_typical_difference_leaves_out_the_few_that_are_far(x, expected):
    close_fp64(typical(torch.tensor(x)), expected)


def test_there_is_no_typical_difference_of_no_tokens():
    with pytest.raises(ValueError, match="of no tokens is not defined"):
        typical(torch.zeros(0))
