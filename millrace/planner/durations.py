"""Durations and lengths of simulated components: given, measured, or from hardware figures. No torch.

A `Quantile` maps a probability between 0 and 1 to the corresponding quantile. Probabilities come from the
caller's seeds, so a simulation is a function of its seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from millrace.errors import PlanError
from millrace.planner.flops import forward_operations
from millrace.planner.hardware import Gpu
from millrace.planner.memory import Memory, Workload, cache_bytes_per_token
from millrace.planner.model_shape import ModelShape
from millrace.planner.step_time import BANDWIDTH_SHARE

Quantile = Callable[[float], float]

_NORMAL = NormalDist()
# The normal distribution has no value at the ends.
_EDGE = 1e-9


def constant(value: float) -> Quantile:
    """Always the same."""
    _check("the constant", value)
    return lambda fraction: value


def lognormal(median: float, spread: float) -> Quantile:
    """Values median * exp(spread * z), z standard normal; a spread of 1 puts 1 % of them above 10 medians."""
    _check("the median", median)
    _check("the spread", spread)

    def quantile(fraction: float) -> float:
        exponent = spread * _NORMAL.inv_cdf(min(max(fraction, _EDGE), 1 - _EDGE))
        # The largest that has an exponential.
        return median * math.exp(min(700.0, exponent))

    return quantile


def given_lognormal(option: str, text: str) -> Quantile:
    """Parse the `MEDIAN,SPREAD` of an option; PlanError if it is malformed."""
    try:
        median, spread = (float(word) for word in text.split(","))
        return lognormal(median, spread)
    except ValueError:
        raise PlanError(
            f"{option} is {text!r}; write the median and the deviation of the logarithm, such as 3000,0.8"
        ) from None


def exponential(mean: float) -> Quantile:
    """Values -mean * log(1 - fraction): times between independent events."""
    _check("the mean", mean)
    return lambda fraction: -mean * math.log1p(-min(fraction, 1 - _EDGE))


def measured(values: Sequence[float]) -> Quantile:
    """One of the values that were measured, each as likely; ValueError if there are none."""
    if not values:
        raise ValueError("no measured values were given; a distribution needs at least one")
    ordered = sorted(values)
    _check("the smallest measured value", ordered[0])
    _check("the largest measured value", ordered[-1])
    return lambda fraction: ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of one decoding step of an engine, which generates one token for each running request.

    Attributes:
        step_s: seconds of a step, however many requests run (reading the weights).
        row_s: seconds for each request that runs (reading its keys and values).
        prompt_token_s: seconds for each token of a prompt, once.
        product_s: seconds for each request that runs, where that is more than all the reading.
    """

    step_s: float = 0.01
    row_s: float = 1e-4
    prompt_token_s: float = 1e-5
    product_s: float = 0.0

    def token_s(self, num_running: int) -> float:
        """Seconds until each of so many requests has one token more."""
        return max(self.step_s + self.row_s * num_running, self.product_s * num_running)


def planned_service(
    shape: ModelShape, work: Workload, memory: Memory, gpu: Gpu, *, mfu: float, num_running: int
) -> StepCost:
    """What a step of an engine costs as `step_time` counts it: weights, keys and values, and products.

    `mfu` is the fraction of the peak that matrix products reach. A running request has generated half of
    `completion_tokens` on average; `num_running` determines how many experts of a mixture are read. Every
    rank has an engine.
    """
    rate, bandwidth = gpu.flops(work.weight_bytes) * mfu, gpu.bandwidth * BANDWIDTH_SHARE
    context = work.prompt_tokens + work.completion_tokens // 2
    idle = shape.idle_expert_parameters(num_running) * work.weight_bytes
    prompt = forward_operations(shape, [work.prompt_tokens], 1)
    return StepCost(
        step_s=(memory.sampler - idle) / bandwidth,
        row_s=context * cache_bytes_per_token(shape, work.weight_bytes) / bandwidth,
        prompt_token_s=prompt.total / rate / work.prompt_tokens,
        product_s=2 * shape.num_active_parameters / rate,
    )


def share_of(seed: int) -> float:
    """A number between 0 and 1 that neighbouring seeds do not share (splitmix64)."""
    mixed = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) / 2**64


def _check(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} is {value}; it must be 0 or more and finite")
