"""Lengths of completions: an online log-normal model with a conjugate prior, by prompt. No torch.

    log(length) ~ Normal(mean, variance),  (mean, variance) ~ Normal-inverse-gamma

so a length that was not seen has a Student t distribution of its logarithm. Each level of a key (all,
length of the prompt, group, prompt) has the level above as prior: a prompt that was never sampled is
predicted as its group, one that was sampled often as itself. How many lengths the prior is worth follows from
the variances within and between the prompts of all levels of that kind, which are pooled (empirical Bayes).

A completion that was truncated at `max_tokens` is a censored length: it is at least that long. Its logarithm
enters with the moments that it is expected to have, given the fit (expectation maximisation).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, stdtr, stdtrit

# Lengths that the first prior is worth, and a prior of the variance of any level.
PRIOR_LENGTHS = 2.0
# Bounds of the lengths that the prior of a level's mean is worth.
LEAST_WEIGHT, MOST_WEIGHT = 0.05, 20.0
MAX_ROUNDS, TOLERANCE = 50, 1e-6
# A mean is an integral over the lengths so many deviations about the location, and so many in each octave.
DEVIATIONS = np.arange(-6.0, 6.01, 0.25)
PER_OCTAVE = 8


class LengthKey(NamedTuple):
    """Of what a length is: a prompt, its group (a data set, an environment), and the tokens of the prompt."""

    num_prompt_tokens: int
    prompt_id: str | None = None
    group: str | None = None

    def levels(self) -> list[tuple[str, Hashable]]:
        """From the most general level to the most special one; lengths of prompts differ by powers of 2."""
        found: list[tuple[str, Hashable]] = [("all", None), ("bucket", self.num_prompt_tokens.bit_length())]
        if self.group is not None:
            found.append(("group", self.group))
        if self.prompt_id is not None:
            found.append(("prompt", (self.group, self.prompt_id)))
        return found


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """Distribution of a completion's length, Student t in its logarithm, up to `max_tokens`.

    `level` is the most special one with lengths: prompt, group, bucket (of prompt lengths), all or prior.
    """

    location: float
    scale: float
    degrees: float
    max_tokens: int
    level: str

    def still_running(self, num_tokens: float, *, given: float = 0.0) -> float:
        """P(length > num_tokens | length > given); 0 from `max_tokens` on, 1 up to `given`."""
        if num_tokens >= self.max_tokens:
            return 0.0
        known = self._survival(given)
        # A request that lives on although that was all but impossible: nothing is known of it.
        return min(1.0, self._survival(num_tokens) / known) if known > 0 else 1.0

    def _survival(self, num_tokens: float) -> float:
        if num_tokens <= 0:
            return 1.0
        return float(stdtr(self.degrees, (self.location - math.log(num_tokens)) / self.scale))

    def quantile(self, probability: float) -> float:
        """Return the length that is not exceeded with a probability between 0 and 1."""
        return min(float(self.max_tokens), self._untruncated(probability))

    def _untruncated(self, probability: float) -> float:
        return math.exp(min(700.0, self.location + self.scale * stdtrit(self.degrees, probability)))

    @property
    def p90(self) -> float:
        """The length that is exceeded with a probability of 0.1."""
        return self.quantile(0.9)

    def mean(self, *, given: float = 0.0) -> float:
        """E[length | length > given], in tokens, with completions truncated at `max_tokens`."""
        return float(self.means(np.array([given]))[0])

    def means(self, given_G: np.ndarray) -> np.ndarray:
        """Return the means given that lengths are above each of `given_G`; they are from 1 to `max_tokens`.

        E[length | length > g] = g + integral from g to max_tokens of P(length > x) dx / P(length > g)
        """
        most = float(self.max_tokens)
        from_G = np.minimum(np.maximum(given_G, 1.0), most)
        around = self.location + self.scale * DEVIATIONS
        lengths = np.exp(np.minimum(np.maximum(around, 0.0), math.log(most)))
        octaves = np.exp2(np.arange(0.0, self.max_tokens.bit_length(), 1 / PER_OCTAVE))
        length_N = np.unique(np.concatenate((octaves[octaves < most], lengths, from_G, [most])))
        log_N = np.log(length_N)
        survival_N = stdtr(self.degrees, (self.location - log_N) / self.scale)
        # Trapezoids over the logarithm, summed from the longest length down.
        height_N = survival_N * length_N
        area_N = np.diff(log_N) * (height_N[1:] + height_N[:-1]) / 2
        above_N = np.append(np.cumsum(area_N[::-1])[::-1], 0.0)
        at_G = np.searchsorted(length_N, from_G)
        known_G = np.where(given_G < 1, 1.0, survival_N[at_G])
        # A request that lives on although that was all but impossible: nothing is known of it.
        mean_G = from_G + above_N[at_G] / np.maximum(known_G, 1e-300)
        return np.where(known_G > 0, np.minimum(most, mean_G), most)


class _Prior(NamedTuple):
    """Normal-inverse-gamma: mean, lengths that it is worth, shape and scale of the variance."""

    mean: float
    weight: float
    shape: float
    rate: float

    @property
    def variance(self) -> float:
        return self.rate / self.shape


@dataclass(slots=True)
class _Level:
    """Sufficient statistics of logarithms; those of censored lengths are counted by their bounds."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0
    censored: Counter[float] = field(default_factory=Counter)
    fit: _Prior | None = None

    def add(self, logarithm: float, *, truncated: bool) -> float:
        """Add a length; return what the sum of squares about the mean grows by, 0 for a censored one."""
        if truncated:
            self.censored[logarithm] += 1
            return 0.0
        grows = (logarithm - self.total / self.num) ** 2 * self.num / (self.num + 1) if self.num else 0.0
        self.num += 1
        self.total += logarithm
        self.squares += logarithm**2
        return grows

    def posterior(self, prior: _Prior) -> _Prior:
        # The last fit is near; where it begins changes nothing that counts.
        found = self.fit or prior
        for _ in range(MAX_ROUNDS if self.censored else 1):
            before, found = found, self._updated(prior, found)
            if abs(found.mean - before.mean) + abs(found.variance - before.variance) < TOLERANCE:
                break
        self.fit = found
        return found

    def _updated(self, prior: _Prior, fit: _Prior) -> _Prior:
        """The posterior, where censored lengths have the moments that they have under a fit."""
        num, total, squares = float(self.num), self.total, self.squares
        deviation = math.sqrt(fit.variance)
        if self.censored:
            bound_C, count_C = np.array(list(self.censored.items())).T
            z_C = (bound_C - fit.mean) / deviation
            hazard_C = np.exp(-0.5 * z_C * z_C - 0.5 * math.log(2 * math.pi) - log_ndtr(-z_C))
            mean_C = fit.mean + deviation * hazard_C
            variance_C = fit.variance * np.maximum(0.0, 1 + z_C * hazard_C - hazard_C**2)
            num += float(count_C.sum())
            total += float((count_C * mean_C).sum())
            squares += float((count_C * (mean_C**2 + variance_C)).sum())
        average, weight = total / num, prior.weight + num
        rate = prior.rate + max(0.0, squares - num * average**2) / 2
        rate += prior.weight * num * (average - prior.mean) ** 2 / (2 * weight)
        return _Prior((prior.weight * prior.mean + total) / weight, weight, prior.shape + num / 2, rate)


class LengthCalibration(NamedTuple):
    """How many observed lengths the P90 forecast before them covers; well calibrated are 0.9 of them.

    Forecasts that reach `max_tokens` cover every completion, and are not counted.
    """

    num_forecasts: int
    num_covered: int

    @property
    def coverage(self) -> float:
        """Covered fraction; NaN without forecasts."""
        return self.num_covered / self.num_forecasts if self.num_forecasts else math.nan


class LengthModel:
    """Predicts lengths of completions from those that were observed; one small entry for each prompt.

    Before anything is observed, the logarithm of a length has the `median`'s and the deviation `spread`. A
    number that is not above 0 is a ValueError. With `max_prompts`, prompts beyond so many are forgotten, the
    one first that was observed first.
    """

    def __init__(self, *, median: float = 256.0, spread: float = 1.0, max_prompts: int | None = None) -> None:
        if median <= 0 or spread <= 0:
            raise ValueError(f"median is {median} and spread {spread}; both must be above 0")
        half = PRIOR_LENGTHS / 2
        self._prior = _Prior(math.log(median), PRIOR_LENGTHS, half, half * spread**2)
        self._levels: dict[tuple[str, Hashable], _Level] = {}
        self._max_prompts = max_prompts
        # Those that have a level, in the order of their first length.
        self._prompts: deque[tuple[str, Hashable]] = deque()
        # By kind of level: sum of squares about the means of all such levels, and its degrees of freedom.
        self._within: dict[str, tuple[float, int]] = {}
        self.calibration = LengthCalibration(0, 0)

    def observe(self, key: LengthKey, length: int, *, max_tokens: int, truncated: bool) -> None:
        """Add a completion of so many tokens; `truncated` if it ended for `max_tokens`.

        ValueError if it has no token, or more than `max_tokens`.
        """
        if not 1 <= length <= max_tokens:
            raise ValueError(f"a completion of {length} tokens was given with max_tokens {max_tokens}")
        p90 = self.forecast(key, max_tokens=max_tokens).p90
        if p90 < max_tokens:
            num, covered = self.calibration
            self.calibration = LengthCalibration(num + 1, covered + (length <= p90 and not truncated))
        for level in key.levels():
            if level[0] == "prompt" and level not in self._levels:
                self._add_prompt(level)
            known = self._levels.setdefault(level, _Level())
            is_first = not known.num
            grows = known.add(math.log(length), truncated=truncated)
            squares, degrees = self._within.get(level[0], (0.0, 0))
            self._within[level[0]] = squares + grows, degrees + (not truncated and not is_first)

    def _add_prompt(self, level: tuple[str, Hashable]) -> None:
        self._prompts.append(level)
        if self._max_prompts is not None and len(self._prompts) > self._max_prompts:
            del self._levels[self._prompts.popleft()]

    def forecast(self, key: LengthKey, *, max_tokens: int) -> LengthForecast:
        """Predict the length of a completion."""
        found, name = self._prior, "prior"
        for level in key.levels():
            if (known := self._levels.get(level)) is None:
                continue
            prior = found if name == "prior" else self._prior_below(found, level[0])
            found, name = known.posterior(prior), level[0]
        scale = math.sqrt(found.variance * (1 + 1 / found.weight))
        return LengthForecast(found.mean, scale, 2 * found.shape, max_tokens, name)

    def _prior_below(self, above: _Prior, kind: str) -> _Prior:
        """The prior of a level of this kind, from the posterior of the level above it."""
        squares, degrees = self._within[kind]
        within = (squares + PRIOR_LENGTHS * above.variance) / (degrees + PRIOR_LENGTHS)
        between = above.variance - within
        weight = within / between if between > 0 else MOST_WEIGHT
        weight = min(MOST_WEIGHT, max(LEAST_WEIGHT, weight))
        return _Prior(above.mean, weight, PRIOR_LENGTHS, PRIOR_LENGTHS * within)
