"""Weighted sum of several rewards."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial

from millrace.config.reward_sections import distinct
from millrace.protocols import Reward
from millrace.rewards.isolated import IsolatedReward
from millrace.rewards.reward_errors import RewardError
from millrace.types import Episode, Outcome, Prompt


class NoReward:
    """The reward of a recipe whose environment scores every episode."""

    sees_episodes = False

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """Return nothing for nothing; ValueError for a completion, which nothing could score."""
        if completions:
            raise ValueError("the recipe has no reward, and an episode has no score of its environment")
        return []

    def close(self) -> None:
        """Do nothing."""


class CombinedReward:
    """Combine rewards as R = sum over parts of weight times value.

    An outcome is `failed` if any part failed, else `invalid` if any part is invalid (its value is still the
    weighted sum), else a `score`. `Outcome.parts` holds each part's own value, without its weight, by name; a
    duplicate name gets a number: format, format-2. The extras of a part follow its name and a slash.

    The rewards in `apart` compute outside this process and run concurrently, each called from its own thread.
    The others run sequentially in the calling thread, because they use torch's threads and device.
    RewardError if there is no part, or a weight is not finite.
    """

    def __init__(self, parts: Sequence[tuple[str, float, Reward]], *, apart: Container[Reward] = ()) -> None:
        if not parts:
            raise RewardError("there is no reward to combine; name at least one under rewards")
        for name, weight, _ in parts:
            if not math.isfinite(weight):
                raise RewardError(f"the weight of reward {name} is {weight}; it must be a finite number")
        self._weights = [weight for _, weight, _ in parts]
        self._rewards = [reward for _, _, reward in parts]
        self.names = distinct([name for name, _, _ in parts])
        # A single reward needs no thread: it runs in the calling thread.
        self._apart = [reward in apart and len(parts) > 1 for reward in self._rewards]
        self._threads = ThreadPoolExecutor(max(1, sum(self._apart)), "millrace-score")

    @property
    def sees_episodes(self) -> bool:
        """Whether a part needs the episodes."""
        return any(isinstance(one, IsolatedReward) and one.sees_episodes for one in self._rewards)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """Return one outcome for each completion, or raise the first part's error after all have finished."""
        calls = [
            partial(reward.score, prompts, completions, episodes)
            if isinstance(reward, IsolatedReward)
            else partial(reward.score, prompts, completions)
            for reward in self._rewards
        ]
        columns = [found.result() for found in self._all(calls)]
        return [self._sum(outcomes) for outcomes in zip(*columns, strict=True)]

    def close(self) -> None:
        """Close every part, even if one of them raises."""
        with ExitStack() as stack:
            stack.callback(self._threads.shutdown)
            for reward in self._rewards:
                stack.callback(reward.close)

    def _all(self, calls: Sequence[Callable[[], list[Outcome]]]) -> list[Future[list[Outcome]]]:
        pairs = list(zip(calls, self._apart, strict=True))
        futures = [self._threads.submit(call) if apart else None for call, apart in pairs]
        try:
            found = [one or _called(call) for one, call in zip(futures, calls, strict=True)]
            wait(found)
        except BaseException:
            # Ctrl-C must not wait for workers: `close` and exit join the threads that wait for them.
            for one, reward in zip(futures, self._rewards, strict=True):
                if one is not None and not one.cancel():
                    reward.close()
            raise
        return found

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        named = dict(zip(self.names, outcomes, strict=True))
        parts = {name: outcome.value for name, outcome in named.items()}
        extras = {
            f"{name}/{key}": value for name, outcome in named.items() for key, value in outcome.extras.items()
        }
        failed, invalid = (
            "; ".join(f"{name}: {one.reason}" for name, one in named.items() if one.kind == kind)
            for kind in ("failed", "invalid")
        )
        if failed:
            return Outcome("failed", math.nan, failed, parts, extras)
        total = math.fsum(map(operator.mul, self._weights, parts.values()))
        return Outcome("invalid" if invalid else "score", total, invalid, parts, extras)


def _called(call: Callable[[], list[Outcome]]) -> Future[list[Outcome]]:
    found: Future[list[Outcome]] = Future()
    try:
        found.set_result(call())
    except Exception as error:
        found.set_exception(error)
    return found
