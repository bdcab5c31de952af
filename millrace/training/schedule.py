"""Learning rate and coefficients as functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    shape: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    total_steps: int,
    floor: float = 0.1,
) -> float:
    """Learning rate of optimizer step `step` (counted from 0).

    It rises linearly to `peak` over `warmup_steps`, then stays, or falls to the fraction `floor` of it at
    `total_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if shape == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - done if shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (floor + (1 - floor) * left)


def linear(step: int, *, first: float, last: float, total_steps: int) -> float:
    """Value at optimizer step `step` (counted from 0) of a line from `first` to `last`, at `total_steps`."""
    return first + (last - first) * min(1.0, step / max(1, total_steps))
