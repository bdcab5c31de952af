"""Whether what is dropped differs from what is trained on.

A run that drops what is slow, old or failed trains on another distribution than it samples: mostly on
shorter answers and easier prompts. The meter compares all trajectories with those that were used, over the
last groups whose fate is known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

# Groups that are compared: enough that 3 standard errors are below THRESHOLD where a tenth is dropped.
WINDOW = 512
# Differences of means from here on are what the literature on matched samples calls an imbalance.
THRESHOLD = 0.1
# Standard errors by which chance alone hardly ever moves a mean, though it is looked at after each batch.
NUM_ERRORS = 3.0


class BiasMeter:
    """Standardised mean differences of length, reward and difficulty.

    For each fact `d = (mean of the used - mean of all) / standard deviation of all`, over trajectories. The
    difficulty of a trajectory is 1 - the mean reward of its group. Had chance dropped whole groups, d would
    have a standard error of `sqrt((1 / share - 1) / groups)`, with `share` of the trajectories used: those
    of a group count as one, because they are dropped together.

    What failed to be scored is not used: a reward that runs out of time does so where answers are long.
    Groups that were ended before they were scored have no reward. What was still being drawn counts as long
    as the longest of the batch that it missed, so the true difference in length is rather larger than d.

    Source: Austin 2009, "Balance diagnostics for comparing the distribution of baseline covariates between
    treatment groups in propensity-score matched samples", for the threshold; Cochran 1977, "Sampling
    Techniques", for the error of a mean drawn without replacement.
    """

    def __init__(self) -> None:
        # Of each group: lengths, rewards (None where there is none) and what was used.
        self._groups: deque[tuple[list[float], list[float | None], list[bool]]] = deque(maxlen=WINDOW)

    def add(self, lengths: Sequence[float], rewards: Sequence[float], used: Sequence[bool]) -> None:
        """A group whose fate is known.

        Args:
            lengths: tokens drawn for each trajectory, also of one that was ended.
            rewards: of each trajectory; NaN where there is none.
            used: of each trajectory, whether it was trained on, or left out only because all rewards of its
                group are equal.

        Raises:
            ValueError: the three differ in length, or have none.
        """
        if not 0 < len(lengths) == len(rewards) == len(used):
            raise ValueError(
                f"a group has {len(lengths)} lengths, {len(rewards)} rewards and {len(used)} flags of use"
            )
        known = [reward if math.isfinite(reward) else None for reward in rewards]
        self._groups.append((list(lengths), known, list(used)))

    @property
    def drops(self) -> bool:
        """Whether anything of these groups was not used."""
        return not all(use for _, _, uses in self._groups for use in uses)

    def record(self) -> dict[str, float]:
        """`bias/dropped_share` of the trajectories, and d of each fact where the numbers tell it."""
        if not self._groups:
            return {}
        found = {f"bias/{name}": difference for name, (difference, _) in self._differences().items()}
        used = [use for _, _, uses in self._groups for use in uses]
        return {"bias/dropped_share": 1 - sum(used) / len(used), **found}

    def warning(self) -> str | None:
        """A sentence where dropping selects: |d| is above the threshold and above what chance does."""
        if not self.drops:
            return None
        biased = {
            name: difference
            for name, (difference, error) in self._differences().items()
            if abs(difference) > max(THRESHOLD, NUM_ERRORS * error)
        }
        if not biased:
            return None
        moved = ", ".join(f"{name} {difference:+.2f}" for name, difference in biased.items())
        dropped = self.record()["bias/dropped_share"]
        return (
            f"what is trained on differs from what was sampled, in standard deviations: {moved} (of the last "
            f"{len(self._groups)} groups {dropped:.0%} was not used); wait for slow groups (flow.stale wait, "
            "flow.spare_groups 0), raise flow.staleness, or see why rewards fail (reward/failed_share)"
        )

    def state(self) -> list[Any]:
        """Plain JSON."""
        return [list(group) for group in self._groups]

    def load_state(self, state: Sequence[Any]) -> None:
        """Continue there."""
        self._groups = deque(((lengths, rewards, used) for lengths, rewards, used in state), maxlen=WINDOW)

    def _differences(self) -> dict[str, tuple[float, float]]:
        """Each fact's d and its standard error by chance, where it is known and varies."""
        # For each fact: its values with whether each was used, and the groups that have one.
        known: dict[str, list[tuple[float, bool]]] = {"length": [], "reward": [], "difficulty": []}
        num_groups = dict.fromkeys(known, 0)
        for lengths, rewards, used in self._groups:
            scored = [(reward, use) for reward, use in zip(rewards, used, strict=True) if reward is not None]
            known["length"] += zip(lengths, used, strict=True)
            num_groups["length"] += 1
            if scored:
                difficulty = 1 - _mean([reward for reward, _ in scored])
                known["reward"] += scored
                known["difficulty"] += [(difficulty, use) for _, use in scored]
                num_groups["reward"] += 1
                num_groups["difficulty"] += 1
        found = {}
        for name, values in known.items():
            everything, trained = [value for value, _ in values], [value for value, use in values if use]
            if trained and min(everything) < max(everything):
                mean = _mean(everything)
                deviation = math.sqrt(_mean([(value - mean) ** 2 for value in everything]))
                error = math.sqrt((len(everything) / len(trained) - 1) / num_groups[name])
                found[name] = ((_mean(trained) - mean) / deviation, error)
        return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
