"""Which scored groups have nothing to learn from: by a number of their answers, or by a user's function."""

from __future__ import annotations

import math
from collections.abc import Callable

from millrace.data.plugin import Plugin, PluginError
from millrace.types import Group, Trajectory

REWARD, LENGTH = "reward", "length"
INPUTS = ("row", "answers", "rewards", "lengths", "truncated", "numbers")
# A scored group -> whether dynamic sampling replaces it, and training leaves it out.
GroupFilter = Callable[[Group], bool]


class EqualNumbers:
    """Leaves out groups all of whose answers have the same number.

    `name` is `length`, a reward of the recipe, or a number that a reward returns beside its score.
    """

    def __init__(self, name: str) -> None:
        self._rule = name

    def __call__(self, group: Group) -> bool:
        """Return whether a scored group is left out; PluginError if no answer has the number."""
        values = [self._value(t) for t in group.trajectories if t.outcome and t.outcome.kind != "failed"]
        known = {value for value in values if not math.isnan(value)}
        if values and not known:
            there = sorted({LENGTH, REWARD}.union(*(numbers_of(t) for t in group.trajectories)))
            raise PluginError(
                f"rollout.group_filter is {self._rule}, and no answer to prompt {group.prompt.id} has such a "
                f"number; there are: {', '.join(there)}"
            )
        return len(known) < 2

    def _value(self, trajectory: Trajectory) -> float:
        if self._rule == LENGTH:
            return float(trajectory.num_actions)
        numbers = numbers_of(trajectory)
        # A number that a reward returned beside its score is also found without the name of the reward.
        names = [name for name in numbers if self._rule in (name, name.partition("/")[2])]
        return numbers[names[0]] if names else math.nan


class FilterPlugin:
    """A filter of a user's own."""

    def __init__(self, reference: str) -> None:
        """Import the function; SetupError if it cannot be called."""
        self._plugin = Plugin.load("rollout.group_filter", reference, INPUTS)

    def __call__(self, group: Group) -> bool:
        """Return whether a scored group is left out; PluginError if it raises or returns no bool."""
        every = group.trajectories
        kept = self._plugin(
            row=group.prompt.row,
            answers=[t.turns[-1].completion.text if t.turns else "" for t in every],
            rewards=[
                math.nan if t.outcome is None or t.outcome.kind == "failed" else t.episode_return
                for t in every
            ],
            lengths=[t.num_actions for t in every],
            truncated=[t.finish_reason == "length" for t in every],
            numbers=[numbers_of(t) for t in every],
        )
        if not isinstance(kept, bool):
            raise self._plugin.refuse(
                f"returned a {type(kept).__name__} for prompt {group.prompt.id}; return True to keep the "
                "group, or False"
            )
        return not kept


def numbers_of(trajectory: Trajectory) -> dict[str, float]:
    """Return the summed rewards of an answer, and the numbers that rewards returned beside them, by name."""
    if trajectory.outcome is None:
        return {}
    extras = {name: value for name, value in trajectory.outcome.extras.items() if not isinstance(value, str)}
    return {**trajectory.outcome.parts, **extras}
