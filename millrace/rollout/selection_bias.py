"""Selection bias: trained-on rollouts against all sampled ones.

A run that drops slow, stale or failed rollouts trains on another distribution than it samples: mostly on
shorter answers and easier prompts. The meter compares all trajectories with the used ones, over the last
groups that were trained on or dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

# Number of compared groups: enough that 3 standard errors are below THRESHOLD if a tenth is dropped.
WINDOW = 512
# The literature on matched samples calls a larger standardised mean difference an imbalance.
THRESHOLD = 0.1
# Chance alone rarely moves a mean by so many standard errors, even with one test per batch.
NUM_ERRORS = 3.0


class BiasMeter:
    """Standardised mean differences of length, reward and difficulty.

    For each quantity `d = (mean of the used - mean of all) / standard deviation of all`, over trajectories.
    The difficulty of a trajectory is 1 - the mean reward of its group. If whole groups were dropped at
    random, d would have a standard error of `sqrt((1 / fraction - 1) / groups)`, with `fraction` of the
    trajectories used. The trajectories of a group count as one, because they are dropped together.

    Trajectories with a failed score count as not used: a reward times out mostly on long answers. Groups that
    were aborted before scoring have no reward. A trajectory that was still in generation counts as long as
    the longest of the batch that it missed, so the true difference in length tends to be larger than d.

    Source: Austin 2009, "Balance diagnostics for comparing the distribution of baseline covariates between
    treatment groups in propensity-score matched samples", for the threshold; Cochran 1977, "Sampling
    Techniques", for the error of a mean sampled without replacement.
    """

    def __init__(self) -> None:
        # For each group: lengths, rewards (None without a score) and whether each trajectory was used.
        self._groups: deque[tuple[list[float], list[float | None], list[bool]]] = deque(maxlen=WINDOW)

    def add(self, lengths: Sequence[float], rewards: Sequence[float], used: Sequence[bool]) -> None:
        """Add a group that was trained on or dropped.

        Args:
            lengths: generated tokens of each trajectory, also of an aborted one.
            rewards: of each trajectory; NaN without a score.
            used: whether each trajectory was trained on, or left out only because all rewards of its group
                are equal.

        Raises:
            ValueError: the three differ in length, or are empty.
        """
        if not 0 < len(lengths) == len(rewards) == len(used):
            raise ValueError(
                f"a group has {len(lengths)} lengths, {len(rewards)} rewards and {len(used)} flags of use"
            )
        known = [reward if math.isfinite(reward) else None for reward in rewards]
        self._groups.append((list(lengths), known, list(used)))

    @property
    def drops(self) -> bool:
        """Whether any trajectory of these groups was not used."""
        return not all(use for _, _, uses in self._groups for use in uses)

    def record(self) -> dict[str, float]:
        """Return the fraction of dropped trajectories and each defined d, by metric name."""
        if not self._groups:
            return {}
        found = {
            f"selection_bias/{name}": difference for name, (difference, _) in self._differences().items()
        }
        used = [use for _, _, uses in self._groups for use in uses]
        return {"selection_bias/dropped_fraction": 1 - sum(used) / len(used), **found}

    def warning(self) -> str | None:
        """Return a warning if |d| is above both the threshold and the effect of chance, else None."""
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
        dropped = self.record()["selection_bias/dropped_fraction"]
        return (
            f"what is trained on differs from what was sampled, in standard deviations: {moved} (of the last "
            f"{len(self._groups)} groups {dropped:.0%} was not used); wait for slow groups "
            "(rollout.stale_policy wait, rollout.oversample_groups 0), raise rollout.max_staleness, or see "
            "why rewards fail (reward/failed_fraction)"
        )

    def state(self) -> list[Any]:
        """Return the state as plain JSON."""
        return [list(group) for group in self._groups]

    def load_state(self, state: Sequence[Any]) -> None:
        """Restore the state."""
        self._groups = deque(((lengths, rewards, used) for lengths, rewards, used in state), maxlen=WINDOW)

    def _differences(self) -> dict[str, tuple[float, float]]:
        """Return d and its standard error for each quantity that is known and varies."""
        # For each quantity: its values with whether each was used, and the number of groups that have one.
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
