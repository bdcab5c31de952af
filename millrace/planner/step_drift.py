"""Drift of a running engine from its cost model. No torch."""

from __future__ import annotations

import math

# Of actual over predicted seconds; outside of it decisions that use the model are wrong.
LOW, HIGH = 0.8, 1.25


class StepDrift:
    """Factor actual / predicted of an engine's steps, as an exponentially weighted mean.

    The mean is that of the factor's logarithm, so half and twice the time weigh the same. A step has the
    weight 1 / `memory`; `factor` is 1 before the first one. Multiply predictions by it to correct them.
    `alarmed` is whether the factor is outside [LOW, HIGH] after `memory` steps at least.
    """

    def __init__(self, memory: int = 100) -> None:
        if memory < 1:
            raise ValueError(f"memory is {memory}; it must be at least 1 step")
        self._memory, self._num_steps, self._mean = memory, 0, 0.0
        self.alarmed = False

    @property
    def factor(self) -> float:
        """The current factor."""
        return math.exp(self._mean)

    def add(self, actual_s: float, predicted_s: float) -> str:
        """Add a step; return a warning if an alarm begins with it, else an empty text.

        ValueError if a number is not above 0.
        """
        if actual_s <= 0 or predicted_s <= 0:
            raise ValueError(f"a step took {actual_s} s, and {predicted_s} s were predicted; give both > 0")
        self._num_steps += 1
        # The mean of all steps until there are as many as it remembers.
        weight = 1 / min(self._num_steps, self._memory)
        self._mean += weight * (math.log(actual_s / predicted_s) - self._mean)
        before, self.alarmed = (
            self.alarmed,
            (self._num_steps >= self._memory and not LOW <= self.factor <= HIGH),
        )
        if before or not self.alarmed:
            return ""
        return (
            f"steps take {self.factor:.2f} times as long as the cost model predicts (usual are {LOW} to "
            f"{HIGH}); if the machine is not busy with something else, measure the engine again"
        )
