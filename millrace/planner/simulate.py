"""Durations and lengths of parts that are not there, from a few numbers or from measured ones. No torch.

A `Quantile` takes a share between 0 and 1 to the value that so large a share lies below. Shares come from the
caller's seeds, so a simulation is a function of its seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

Quantile = Callable[[float], float]

_NORMAL = NormalDist()
# The normal distribution has no value at the ends.
_EDGE = 1e-9


def constant(value: float) -> Quantile:
    """Always the same."""
    _check("the constant", value)
    return lambda share: value


def lognormal(median: float, spread: float) -> Quantile:
    """Values median * exp(spread * z), z standard normal: the long tail of answers, and of most waiting.

    Args:
        median: half of all values lie below.
        spread: standard deviation of the logarithm; 1 puts one value in a hundred above 10 medians.
    """
    _check("the median", median)
    _check("the spread", spread)
    return lambda share: median * math.exp(spread * _NORMAL.inv_cdf(min(max(share, _EDGE), 1 - _EDGE)))


def exponential(mean: float) -> Quantile:
    """Values -mean * log(1 - share): times between events that do not know of each other."""
    _check("the mean", mean)
    return lambda share: -mean * math.log1p(-min(share, 1 - _EDGE))


def measured(values: Sequence[float]) -> Quantile:
    """One of the values that were measured, each as likely.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no measured values were given; a distribution needs at least one")
    ordered = sorted(values)
    _check("the smallest measured value", ordered[0])
    _check("the largest measured value", ordered[-1])
    return lambda share: ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class Service:
    """What a step of an engine costs: it draws one token for each request that runs.

    Attributes:
        step_s: seconds of a step, however many requests run (reading the weights).
        row_s: seconds for each request that runs.
        prompt_token_s: seconds for each token of a prompt, once.
    """

    step_s: float = 0.01
    row_s: float = 1e-4
    prompt_token_s: float = 1e-5

    def token_s(self, num_running: int) -> float:
        """Seconds until each of so many requests has one token more."""
        return self.step_s + self.row_s * num_running


def _check(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} is {value}; it must be 0 or more and finite")
