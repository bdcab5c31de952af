"""Lengths are predicted as distributions, by prompt where it is known, and truncated ones are censored."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import stdtr, stdtrit

from millrace.planner.length_model import LengthForecast, LengthKey, LengthModel
from tests.close import close_fp64

MOST = 1 << 20
# Of a log-normal with median 500 and spread 0.6.
P90 = 500 * math.exp(0.6 * 1.2816)


def taught(lengths, *, max_tokens=MOST) -> LengthModel:
    model = LengthModel()
    for length in lengths:
        kept = min(max_tokens, max(1, round(length)))
        model.observe(LengthKey(100), kept, max_tokens=max_tokens, truncated=kept == max_tokens)
    return model


def lognormal(seed: int, num: int, median: float = 500.0, spread: float = 0.6) -> np.ndarray:
    return median * np.exp(spread * np.random.default_rng(seed).standard_normal(num))


def test_the_distribution_of_many_lengths_is_found():
    found = taught(lognormal(0, 1000)).forecast(LengthKey(100), max_tokens=MOST)
    assert abs(found.location - math.log(500)) < 0.05 and abs(found.scale - 0.6) < 0.03
    assert abs(found.p90 / P90 - 1) < 0.06
    assert abs(found.mean() / (500 * math.exp(0.18)) - 1) < 0.05
    close_fp64(found.still_running(found.quantile(0.3)), 0.7)


@pytest.mark.slow
def test_truncated_lengths_are_censored_and_not_taken_for_short_ones():
    """Half of the completions were cut at the median."""
    found = taught(lognormal(1, 800), max_tokens=500).forecast(LengthKey(100), max_tokens=MOST)
    assert abs(found.p90 / P90 - 1) < 0.12
    naive = taught(np.minimum(lognormal(1, 800), 500.0)).forecast(LengthKey(100), max_tokens=MOST)
    assert naive.p90 < 700 < found.p90
    # What is forecast for requests with this limit stays below it.
    capped = taught(lognormal(1, 800), max_tokens=500).forecast(LengthKey(100), max_tokens=500)
    assert capped.p90 == 500 and capped.mean() < 500 and capped.still_running(500) == 0
    assert abs(capped.still_running(499) - 0.5) < 0.03


def test_a_prompt_is_predicted_as_itself_once_it_was_sampled():
    model, numbers = LengthModel(), np.random.default_rng(2)
    for _ in range(8):
        for prompt, median in (("short", 50), ("long", 5000)):
            length = round(median * math.exp(0.2 * numbers.standard_normal()))
            model.observe(LengthKey(100, prompt, "sums"), length, max_tokens=MOST, truncated=False)
    short, long, new, other, far = (
        model.forecast(key, max_tokens=MOST)
        for key in (
            LengthKey(100, "short", "sums"),
            LengthKey(100, "long", "sums"),
            LengthKey(100, "new", "sums"),
            LengthKey(120, "new", "other"),
            LengthKey(9000, "new", "other"),
        )
    )
    assert [one.level for one in (short, long, new, other, far)] == [
        "prompt",
        "prompt",
        "group",
        "bucket",
        "all",
    ]
    assert short.quantile(0.5) < 150 and long.quantile(0.5) > 2500
    assert short.p90 < new.quantile(0.5) * 1.5 < long.p90
    assert LengthModel().forecast(LengthKey(1), max_tokens=9).level == "prior"


def test_the_p90_covers_nine_tenths_of_what_comes():
    """Each prompt has its own median; every forecast is made before its length is observed."""
    numbers = np.random.default_rng(3)
    median_P = 400 * np.exp(0.8 * numbers.standard_normal(60))
    model = LengthModel()
    for _ in range(10):
        for prompt, median in enumerate(median_P):
            length = round(median * math.exp(0.5 * numbers.standard_normal()))
            length = min(4000, max(1, length))
            model.observe(LengthKey(64, str(prompt)), length, max_tokens=4000, truncated=length == 4000)
    num, _ = model.calibration
    assert num > 500 and abs(model.calibration.coverage - 0.9) < 0.03


def test_requests_in_flight_are_predicted_from_what_they_have():
    forecast = LengthForecast(math.log(100), 1.0, 1e6, 10_000, "all")
    close_fp64(forecast.still_running(200, given=100), forecast.still_running(200) / 0.5)
    assert forecast.still_running(50, given=100) == 1.0
    # E[L | L > 100] of a log-normal with median 100 and spread 1: 100 e^(1/2) Phi(1) / Phi(0).
    expected = 100 * math.exp(0.5) * 0.8413 / 0.5
    assert abs(forecast.mean(given=100) / expected - 1) < 0.02
    assert forecast.mean() < forecast.mean(given=100) < forecast.mean(given=1000) < 10_000
    assert forecast.mean(given=10_000) == 10_000


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize("scale", [0.03, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("degrees", [4.0, 200.0])
@pytest.mark.parametrize("max_tokens", [30, 400, 100_000])
def test_means_are_those_of_many_quantiles(scale, degrees, max_tokens):
    forecast = LengthForecast(math.log(100), scale, degrees, max_tokens, "all")
    given_G = np.array([0.0, 1.0, 20.0, 100.0, 100.0 * math.exp(3 * scale)])
    level_N = (np.arange(20_000) + 0.5) / 20_000
    for given, mean in zip(given_G, forecast.means(given_G), strict=True):
        known = stdtr(degrees, (forecast.location - math.log(max(given, 1e-9))) / scale)
        log_N = forecast.location - scale * stdtrit(degrees, known * level_N)
        expected = np.clip(np.exp(log_N), max(1.0, given), max_tokens).mean()
        assert abs(mean / expected - 1) < 0.01
    assert forecast.mean(given=20.0) == forecast.means(given_G)[2]


def test_impossible_lengths_are_refused():
    model = LengthModel()
    with pytest.raises(ValueError, match="a completion of 11 tokens was given with max_tokens 10"):
        model.observe(LengthKey(1), 11, max_tokens=10, truncated=True)
    with pytest.raises(ValueError, match="median is 0 and spread 1"):
        LengthModel(median=0, spread=1)
    assert math.isnan(model.calibration.coverage)
