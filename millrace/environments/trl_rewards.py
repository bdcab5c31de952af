"""Rewards of an episode as GRPOTrainer of TRL computes them. No torch, no TRL."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from millrace.environments.row_prompts import PROMPT_COLUMN
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.errors import SetupError
from millrace.types import Task

GET_REWARD = "get_reward"
# TRL gives its reward functions these, too.
_OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric")
_NOT_COLUMNS = (PROMPT_COLUMN, "completion", "completion_ids")


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that has ended, as reward functions get it.

    Attributes:
        played: the object with the methods that the policy called.
        task: what the episode was begun with.
        prompt: messages before the first completion.
        completion: completions and replies in turn, as messages.
        token_ids: those of the completions alone.
    """

    played: Any
    task: Task
    prompt: Sequence[Mapping[str, Any]]
    completion: Sequence[Mapping[str, Any]]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TrlRewards:
    """The sum of what `get_reward` of the object and the reward functions return; None is not counted.

    Attributes:
        functions: by their names.
        is_own: whether the object has a method `get_reward`.
    """

    functions: Mapping[str, Callable[..., Any]]
    is_own: bool

    def check(self, name: str) -> None:
        """Refuse functions that need TRL's trainer with a SetupError; `name` is the environment's."""
        for function, found in self.functions.items():
            needed = [one for one in _OF_THE_TRAINER if one in inspect.signature(found).parameters]
            if needed:
                raise SetupError(
                    f"{name}: {function} takes {needed[0]}, which only TRL's trainer has; remove the argument"
                )

    async def score(self, episode: PlayedEpisode, call: Callable[..., Awaitable[Any]]) -> float:
        """Return the score of an episode; 0 if there are no rewards.

        `call` calls a function with keyword arguments. Functions get a batch of one: `prompts`,
        `completions`, `completion_ids`, `environments` and the columns of the row, each a list.

        Raises:
            EnvironmentFailed: a reward is no number, or all are None.
        """
        row = episode.task.row
        batch = {name: [row[name]] for name in row if name not in _NOT_COLUMNS}
        batch |= {"prompts": [episode.prompt], "completions": [episode.completion]}
        batch |= {"completion_ids": [episode.token_ids], "environments": [episode.played]}
        found = {GET_REWARD: await call(episode.played.get_reward)} if self.is_own else {}
        for name, function in self.functions.items():
            given = await call(function, **batch)
            if not isinstance(given, Sequence) or len(given) != 1:
                raise EnvironmentFailed(f"has a reward function {name} that returned no list of one reward")
            found[name] = given[0]
        rewards = {name: reward for name, reward in found.items() if reward is not None}
        for name, reward in rewards.items():
            if not isinstance(reward, Real):
                raise EnvironmentFailed(f"got {type(reward).__name__} from {name}, not a number or None")
        if found and not rewards:
            raise EnvironmentFailed(f"got no reward: None from {' and '.join(found)}")
        return float(sum(rewards.values()))
