"""Sampled batches, sampling parameters and reward metrics."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.config.rollout_section import RolloutConfig
from millrace.types import EPISODE_ENDS, Group, Outcome, Prompt, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The sampled groups of one batch.

    Attributes:
        groups: every group, scored.
        left_out: indices of groups that are not trained on, because all their rewards are equal.
        baselines: the reward of each group's greedy answer, NaN where it failed; None without baselines.
        num_greedy_tokens: tokens generated for the baselines.
        num_rounds: dynamic sampling rounds: times that new prompts replaced groups of equal reward.
    """

    groups: list[Group]
    left_out: frozenset[int] = frozenset()
    baselines: list[float] | None = None
    num_greedy_tokens: int = 0
    num_rounds: int = 0


def sampling(rollout_config: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the recipe's sampling parameters; the seed is set for each completion."""
    return replace(
        greedy(rollout_config, stop_token_ids),
        temperature=rollout_config.temperature,
        top_k=rollout_config.top_k,
        top_p=rollout_config.top_p,
    )


def greedy(rollout_config: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return greedy sampling parameters, as in evaluation."""
    return SamplingParams(
        max_tokens=rollout_config.max_tokens,
        temperature=0.0,
        stop_token_ids=stop_token_ids,
        stop=rollout_config.stop,
    )


def completion_seed(*parts: int) -> int:
    """Hash the run's seed and the completion's indices (group, sample, turn) to a 64-bit seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def group_rewards(group: Group) -> list[float]:
    """Return the episode returns of a group, without failed ones."""
    return [
        trajectory.episode_return
        for trajectory in group.trajectories
        if trajectory.outcome is not None and trajectory.outcome.kind != "failed"
    ]


def is_equal(group: Group) -> bool:
    """Return whether all rewards of a group are equal, so that its advantages are zero."""
    return len(set(group_rewards(group))) < 2


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the mean number of turns, the fraction of each end, the use of tools, and branches.

    Empty without an environment; without `tools/` if it has no tools, and without `agents/` if it names what
    none of its replies follow. `tools/invalid_fraction` is that of all calls.
    """
    ends = [trajectory.end for trajectory in trajectories]
    if not any(ends):
        return {}
    counts = {f"episode/{end}_fraction": ends.count(end) / len(ends) for end in EPISODE_ENDS}
    turns_mean = sum(len(t.turns) for t in trajectories) / len(ends)
    return {
        "episode/turns_mean": turns_mean,
        **counts,
        **_tool_metrics(trajectories),
        **_branch_metrics(trajectories),
    }


def _branch_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if all(turn.after is None for turn in turns):
        return {}
    return {
        "agents/branches_mean": sum(len(one.branches) for one in trajectories) / len(trajectories),
        "agents/roots_mean": sum(one.num_roots for one in trajectories) / len(trajectories),
        "agents/refused_mean": sum(turn.refused for turn in turns) / len(trajectories),
    }


def _tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns if turn.calls is not None]
    if not turns:
        return {}
    called = sum(any(turn.calls for turn in trajectory.turns) for trajectory in trajectories)
    num_calls, num_invalid = sum(turn.calls or 0 for turn in turns), sum(turn.invalid_calls for turn in turns)
    return {
        "tools/calls_mean": num_calls / len(trajectories),
        "tools/called_fraction": called / len(trajectories),
        "tools/invalid_fraction": num_invalid / max(1, num_calls + num_invalid),
    }


def part_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the names of the summed reward components; empty if there is only one."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.parts))
    return names if len(names) > 1 else []


def part_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Compute the unweighted mean and the failed fraction of each component of a summed reward.

    Failed values are left out of the mean; if all failed, the mean is NaN. Of a number that a reward returned
    beside its score, compute the mean of those that have it.
    """
    found = {}
    for name in part_names(outcomes):
        # A source with rewards of its own has no value of the others; a failure of all has none at all.
        every = [one.parts.get(name, math.nan) for one in outcomes if name in one.parts or not one.parts]
        values = [value for value in every if not math.isnan(value)]
        found[f"reward/{name}/mean"] = sum(values) / len(values) if values else math.nan
        found[f"reward/{name}/failed_fraction"] = 1 - len(values) / len(every)
    for name, value in extra_defaults(outcomes).items():
        if isinstance(value, float):
            numbers = [float(one.extras[name]) for one in outcomes if name in one.extras]
            found[f"reward/{name}"] = sum(numbers) / len(numbers)
    return found


def source_metrics(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    rewards: Sequence[float],
    right: Sequence[bool] = (),
) -> dict[str, float]:
    """Compute each source's fraction of the answers, and of those that did not fail the mean reward.

    With `right`, whether each answer has full marks, also the accuracy. Empty without `data.sources`.
    """
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        if prompt.source:
            places.setdefault(prompt.source, []).append(place)
    found: dict[str, float] = {}
    for name, here in sorted(places.items()):
        found[f"source/{name}/fraction"] = len(here) / len(prompts)
        scored = [place for place in here if outcomes[place].kind != "failed"]
        if scored:
            found[f"source/{name}/reward/mean"] = sum(rewards[place] for place in scored) / len(scored)
        if scored and right:
            found[f"source/{name}/accuracy"] = sum(right[place] for place in scored) / len(scored)
    return found


def extra_defaults(outcomes: Sequence[Outcome]) -> dict[str, float | str]:
    """Return for each name of the outcomes' extras what a row without it has: NaN, or "" if one is a text."""
    found: dict[str, float | str] = {}
    for outcome in outcomes:
        for name, value in outcome.extras.items():
            found[name] = "" if isinstance(value, str) or found.get(name) == "" else math.nan
    return found


def extra_columns(outcome: Outcome, defaults: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the columns of an outcome's extras for a table row, each of the type of its default."""
    return {
        f"reward/{name}": type(default)(outcome.extras.get(name, default))
        for name, default in defaults.items()
    }


def part_columns(outcome: Outcome, names: Sequence[str]) -> dict[str, float]:
    """Return the value of each reward component for a table row; NaN where it failed."""
    return {f"reward/{name}": outcome.parts.get(name, math.nan) for name in names}
