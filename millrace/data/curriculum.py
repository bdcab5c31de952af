"""Curriculum: which prompts of an epoch are used, by their rewards so far. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from millrace.config.inputs import HARD, CurriculumConfig
from millrace.data.functions import FunctionError, explain, imported
from millrace.data.rows import DataError
from millrace.types import Prompt

# How likely a prompt is to be dealt, by its row, the mean reward of its last group (None before the first)
# and how many groups of it batches had.
Chance = Callable[[Mapping[str, Any], float | None, int], float]


def hard(row: Mapping[str, Any], reward: float | None, tries: int) -> float:
    """1 less the mean reward; 1 for what was never tried.

    Source: Kimi Team 2025, "Kimi k1.5" (prioritized sampling).
    """
    return 1.0 if reward is None else 1.0 - reward


class Curriculum:
    """What is known of each prompt, and how likely it is dealt with that."""

    def __init__(self, chance: Chance, *, least: float, name: str = HARD) -> None:
        """Nothing was tried.

        Args:
            chance: of a prompt, from 0 to 1.
            least: chances below are taken for it.
            name: of the chance, for messages.
        """
        self._chance, self._least, self._name = chance, least, name
        self._known: dict[str, tuple[float, int]] = {}

    @classmethod
    def of(cls, config: CurriculumConfig) -> Curriculum:
        """The curriculum that a recipe asks for.

        Raises:
            DataError: there is no such function.
        """
        chance = hard if config.chance == HARD else _own(config.chance)
        return cls(chance, least=config.least, name=config.chance)

    def chance(self, prompt: Prompt) -> float:
        """How likely a prompt is dealt when its turn comes.

        Raises:
            DataError: the recipe's function fails, or gives no number from 0 to 1.
        """
        reward, tries = self._known.get(prompt.id, (None, 0))
        try:
            found = self._chance(prompt.row, reward, tries)
        except Exception as error:
            raise DataError(
                f"data.curriculum.chance {self._name} failed for prompt {prompt.id}: {explain(error)}; "
                "correct it"
            ) from error
        if type(found) not in (int, float) or not 0 <= found <= 1:
            raise DataError(
                f"data.curriculum.chance {self._name} gave {found!r} for prompt {prompt.id}; it must give a "
                "number from 0 to 1"
            )
        return max(float(found), self._least)

    def learn(self, prompt: Prompt, reward: float) -> None:
        """A group of a prompt earned so much in the mean; counted within 0 and 1."""
        _, tries = self._known.get(prompt.id, (0.0, 0))
        self._known[prompt.id] = min(max(reward, 0.0), 1.0), tries + 1

    def state(self) -> dict[str, tuple[float, int]]:
        """Mean reward and number of groups of each prompt that was tried."""
        return dict(self._known)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._known = {id: (float(reward), int(tries)) for id, (reward, tries) in state.items()}


def _own(function: str) -> Chance:
    """A user's; its module may lie in the folder that millrace was started in."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return imported(function)
    except FunctionError as error:
        raise DataError(f"data.curriculum.chance {function}: {error}") from error
