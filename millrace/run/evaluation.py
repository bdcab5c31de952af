"""Evaluation: completions of held-out prompts and their scores; rows of rollout tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.protocols import Engine, Reward
from millrace.rollout.sampled_batch import completion_seed, part_columns, part_metrics, part_names
from millrace.types import Completion, Group, Outcome, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Result of an evaluation on held-out prompts.

    Attributes:
        accuracy: fraction of the scored completions that earned full marks.
        reward: mean of the scored rewards.
        length: mean tokens of a completion.
        truncated: fraction of completions that ran out of tokens.
        failed: fraction of completions whose reward failed.
        rows: one for each completion, for a table.
        parts: metrics of each reward, where there are several.
        left_out: number of prompts dropped because they are too long.
    """

    accuracy: float
    reward: float
    length: float
    truncated: float
    failed: float
    rows: list[dict[str, Any]]
    parts: Mapping[str, float] = field(default_factory=dict)
    left_out: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The values by metric name; `evaluation.measure` names one of them."""
        return {
            "accuracy": self.accuracy,
            "reward/mean": self.reward,
            **self.parts,
            "reward/failed_fraction": self.failed,
            "length/mean": self.length,
            "length/truncated_fraction": self.truncated,
        }


def is_right(outcome: Outcome, full_marks: float) -> bool:
    """Whether an answer earned full marks."""
    return outcome.kind == "score" and outcome.value >= full_marks - 1e-6


def evaluate(
    engine: Engine, reward: Reward, prompts: Sequence[Prompt], params: SamplingParams, *, full_marks: float
) -> Evaluation:
    """Complete every prompt with the same sampling parameters and score the completions.

    At a temperature above 0, each prompt has its own seed.

    Raises:
        ValueError: there are no prompts.
    """
    each = [params] * len(prompts)
    if params.temperature > 0:
        each = [replace(params, seed=completion_seed(params.seed, place)) for place in range(len(prompts))]
    completions = engine.generate([prompt.token_ids for prompt in prompts], each)
    outcomes = reward.score(prompts, [completion.text for completion in completions])
    return summarise(prompts, completions, outcomes, full_marks=full_marks)


def summarise(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    outcomes: Sequence[Outcome],
    *,
    full_marks: float,
) -> Evaluation:
    """Build an `Evaluation` from scored completions; one whose reward failed counts only in `failed`."""
    if not prompts:
        raise ValueError("there are no prompts to evaluate on")
    scored = [outcome for outcome in outcomes if outcome.kind != "failed"]
    count, names = max(1, len(scored)), part_names(outcomes)
    return Evaluation(
        accuracy=sum(is_right(outcome, full_marks) for outcome in scored) / count,
        reward=sum(outcome.value for outcome in scored) / count,
        length=sum(len(completion.token_ids) for completion in completions) / len(prompts),
        truncated=sum(completion.finish_reason == "length" for completion in completions) / len(prompts),
        failed=1 - len(scored) / len(prompts),
        rows=[
            {
                "prompt_id": prompt.id,
                "prompt": prompt.text,
                "completion": completion.text,
                "answer": prompt.answer,
                "reward": outcome.value,
                **part_columns(outcome, names),
                "outcome": outcome.kind,
                "reason": outcome.reason,
                "right": is_right(outcome, full_marks),
                "num_tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            for prompt, completion, outcome in zip(prompts, completions, outcomes, strict=True)
        ],
        parts=part_metrics(outcomes),
    )


def rollout_rows(step: int, groups: Sequence[Group], advantages: Sequence[float]) -> list[dict[str, Any]]:
    """Return one row for each trajectory; `advantages` belong to those whose reward did not fail."""
    rows = []
    left = iter(advantages)
    names = part_names([t.outcome for group in groups for t in group.trajectories if t.outcome])
    for group in groups:
        for sample, trajectory in enumerate(group.trajectories):
            outcome, last = trajectory.outcome, trajectory.turns[-1].completion
            assert outcome is not None
            rows.append(
                {
                    "step": step,
                    "prompt_id": group.prompt.id,
                    "sample": sample,
                    "prompt": group.prompt.text,
                    "completion": trajectory.text,
                    "answer": group.prompt.answer,
                    "reward": trajectory.episode_return,
                    **part_columns(outcome, names),
                    "outcome": outcome.kind,
                    "reason": outcome.reason,
                    "num_tokens": trajectory.num_actions,
                    "finish_reason": last.finish_reason,
                    "version": int(last.versions[-1]),
                    "oldest_version": min(int(turn.completion.versions[0]) for turn in trajectory.turns),
                    "advantage": float("nan") if outcome.kind == "failed" else next(left),
                    "token_ids": list(last.token_ids),
                    # An array keeps its dtype in a table.
                    "logprobs": last.logprobs,
                }
            )
    return rows
