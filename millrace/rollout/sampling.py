"""What is sampled for a batch, and how."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.config.sections import RolloutConfig
from millrace.types import Group, Outcome, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled for one batch.

    Attributes:
        groups: every group, scored.
        left_out: places of those that are not trained on, because all their rewards are equal.
        baselines: the reward of each group's greedy answer, NaN where it failed; None if not asked for.
        num_greedy_tokens: tokens drawn for the baselines.
        num_rounds: times new prompts replaced groups of equal reward.
    """

    groups: list[Group]
    left_out: frozenset[int] = frozenset()
    baselines: list[float] | None = None
    num_greedy_tokens: int = 0
    num_rounds: int = 0


def sampling(rollout_config: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The recipe's sampling parameters; the seed is set for each completion."""
    return replace(
        greedy(rollout_config, stop_token_ids),
        temperature=rollout_config.temperature,
        top_k=rollout_config.top_k,
        top_p=rollout_config.top_p,
    )


def greedy(rollout_config: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The most likely tokens, as evaluation takes them."""
    return SamplingParams(
        max_tokens=rollout_config.max_tokens,
        temperature=0.0,
        stop_token_ids=stop_token_ids,
        stop=rollout_config.stop,
    )


def completion_seed(*parts: int) -> int:
    """A 64-bit seed from the run's seed and the completion's place: group, sample, turn."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def group_rewards(group: Group) -> list[float]:
    """The rewards of a group that did not fail."""
    outcomes = [trajectory.outcome for trajectory in group.trajectories]
    return [outcome.value for outcome in outcomes if outcome is not None and outcome.kind != "failed"]


def is_equal(group: Group) -> bool:
    """Whether all rewards of a group are equal, so that comparing its samples teaches nothing."""
    return len(set(group_rewards(group))) < 2


def part_names(outcomes: Sequence[Outcome]) -> list[str]:
    """The rewards that were added up; none where there is one alone."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.parts))
    return names if len(names) > 1 else []


def part_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of each reward, where several were added up: the mean without its weight, and the fraction that failed.

    A value that failed is in no mean; where all failed, the mean is NaN.
    """
    found = {}
    for name in part_names(outcomes):
        values = [outcome.parts[name] for outcome in outcomes if name in outcome.parts]
        values = [value for value in values if not math.isnan(value)]
        found[f"reward/{name}/mean"] = sum(values) / len(values) if values else math.nan
        found[f"reward/{name}/failed_fraction"] = 1 - len(values) / len(outcomes)
    return found


def part_columns(outcome: Outcome, names: Sequence[str]) -> dict[str, float]:
    """The value of each reward for a row of a table; NaN where it failed."""
    return {f"reward/{name}": outcome.parts.get(name, math.nan) for name in names}
