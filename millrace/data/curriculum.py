"""Curriculum: which prompts of an epoch are used, by their rewards so far. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from millrace.config.inputs import HARD, CurriculumConfig
from millrace.data.plugin import Plugin
from millrace.types import Prompt

# Probability of using a prompt, by its row, the mean reward of its last group (None before the first) and the
# number of its groups that were in batches.
Chance = Callable[[Mapping[str, Any], float | None, int], float]
INPUTS = ("row", "reward", "tries")


def hard(row: Mapping[str, Any], reward: float | None, tries: int) -> float:
    """Return 1 minus the mean reward; 1 for a prompt without a reward yet.

    Source: Kimi Team 2025, "Kimi k1.5" (prioritized sampling).
    """
    return 1.0 if reward is None else 1.0 - reward


class ChancePlugin:
    """A probability of a user's own."""

    def __init__(self, reference: str) -> None:
        """Import the function; SetupError if it cannot be called."""
        self._plugin = Plugin.load("data.curriculum.chance", reference, INPUTS)

    def __call__(self, row: Mapping[str, Any], reward: float | None, tries: int) -> float:
        """Return the probability; PluginError if the function raises or returns none."""
        found = self._plugin(row=row, reward=reward, tries=tries)
        if type(found) not in (int, float) or not 0 <= found <= 1:
            raise self._plugin.refuse(f"returned {found!r}; return a number from 0 to 1")
        return float(found)


class Curriculum:
    """Sampling probability of each prompt, at least `least`, from its rewards so far."""

    def __init__(self, chance: Chance, *, least: float) -> None:
        self._chance, self._least = chance, least
        self._known: dict[str, tuple[float, int]] = {}

    @classmethod
    def of(cls, config: CurriculumConfig) -> Curriculum:
        """Build the curriculum of a recipe; SetupError if its function cannot be called."""
        chance = hard if config.chance == HARD else ChancePlugin(config.chance)
        return cls(chance, least=config.least)

    def chance(self, prompt: Prompt) -> float:
        """The probability that a prompt is used in the epoch; PluginError if the recipe's function fails."""
        reward, tries = self._known.get(prompt.id, (None, 0))
        return max(self._chance(prompt.row, reward, tries), self._least)

    def learn(self, prompt: Prompt, reward: float) -> None:
        """Record the mean reward of a group, clamped to 0 and 1."""
        _, tries = self._known.get(prompt.id, (0.0, 0))
        self._known[prompt.id] = min(max(reward, 0.0), 1.0), tries + 1

    def state(self) -> dict[str, tuple[float, int]]:
        """Return the last mean reward and the number of groups of each prompt with a reward."""
        return dict(self._known)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._known = {id: (float(reward), int(tries)) for id, (reward, tries) in state.items()}
