"""Evaluation: completions of held-out prompts and their scores; rows of rollout tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millrace.config.reward_sections import RewardConfig
from millrace.config.rollout_section import RolloutConfig
from millrace.environments.running_episodes import CloseEpisode
from millrace.protocols import Engine, EpisodeReward
from millrace.rollout.episodes import EpisodeRules, EpisodeView, Sample
from millrace.rollout.sampled_batch import (
    completion_seed,
    episode_metrics,
    extra_columns,
    extra_defaults,
    part_columns,
    part_metrics,
    part_names,
    source_metrics,
)
from millrace.run.build_environments import Environments
from millrace.types import Episode, EpisodeTurn, Group, Outcome, Prompt, SamplingParams, Trajectory


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
        parts: metrics of each reward and each source, where there are several, and of episodes with an
            environment.
        left_out: number of prompts dropped because they are too long.
        sets: metrics of the further sets of this evaluation, such as `eval/aime/avg@8`.
    """

    accuracy: float
    reward: float
    length: float
    truncated: float
    failed: float
    rows: list[dict[str, Any]]
    parts: Mapping[str, float] = field(default_factory=dict)
    left_out: int = 0
    sets: Mapping[str, float] = field(default_factory=dict)

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
            **self.sets,
        }


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedAnswer:
    """A scored answer to one prompt.

    Attributes:
        text: of the last completion.
        outcome: its score.
        num_tokens: sampled tokens.
        finish_reason: of the last completion; `length` if it ran out of tokens.
        columns: further columns of its row.
    """

    text: str
    outcome: Outcome
    num_tokens: int
    finish_reason: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How many answers a question gets, and how they are sampled.

    Attributes:
        num_samples: sampled answers to each question.
        temperature: of the samples; 0 takes the most likely tokens.
        top_p: of the samples.
        beside: whether a greedy answer is generated beside the samples.
    """

    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    beside: bool = False

    def passes(self, params: SamplingParams) -> list[tuple[int, SamplingParams]]:
        """Return the number of answers and the sampling parameters of each pass; the greedy one is last."""
        sampled = replace(params, temperature=self.temperature, top_p=self.top_p)
        each = [(self.num_samples, sampled)]
        return [*each, (1, replace(params, temperature=0.0))] if self.beside else each


def sampling_plan(
    samples: int, temperature: float | None, top_p: float | None, *, greedy: bool, rollout: RolloutConfig
) -> SamplingPlan:
    """Return a plan; None takes the setting of `rollout` for several samples, and greedy decoding for one."""
    several = samples > 1
    if temperature is None:
        temperature = rollout.temperature if several else 0.0
    if top_p is None:
        top_p = rollout.top_p if several else 1.0
    return SamplingPlan(samples, temperature, top_p, beside=greedy)


def repeated(prompts: Sequence[Prompt], num_samples: int) -> list[Prompt]:
    """Return each prompt so many times in a row, one for each of its answers."""
    return [prompt for prompt in prompts for _ in range(num_samples)]


def one_turn(prompt: Prompt, text: str) -> Episode:
    """Return an answer that no model sampled as rewards of whole episodes see it."""
    return Episode((EpisodeTurn(prompt.text, text, len(prompt.token_ids), 0, "stop", 0.0),))


def reference_completion(prompt: Prompt, rewards: Sequence[RewardConfig]) -> str:
    """Return the demonstration, or the answer in the form that the rewards read, as a completion."""
    text = prompt.demonstration if isinstance(prompt.demonstration, str) else prompt.answer
    is_bare = text == prompt.answer and "####" not in text
    return f"#### {text}" if is_bare and any(reward.kind == "gsm8k" for reward in rewards) else text


def is_right(outcome: Outcome, full_marks: float) -> bool:
    """Whether an answer earned full marks."""
    return outcome.kind == "score" and outcome.value >= full_marks - 1e-6


def evaluate(
    engine: Engine,
    reward: EpisodeReward,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    full_marks: float,
    num_samples: int = 1,
    environments: Environments | None = None,
    view_episode: EpisodeView | None = None,
) -> Evaluation:
    """Complete every prompt with the same sampling parameters and score the completions.

    With environments, an episode is played for each completion. At a temperature above 0, each prompt, each
    sample and each turn has its own seed; the first sample is the same for any number of them. A reward that
    sees episodes gets what `view_episode` returns. The rows of a prompt's samples follow each other.

    Raises:
        ValueError: there are no prompts.
    """
    rules = None if environments is None else environments.rules
    samples = [Sample(number, place) for number in range(len(prompts)) for place in range(num_samples)]
    if environments is None:
        for sample in samples:
            sample.observe(prompts[sample.number].token_ids)
    while running := [sample for sample in samples if not sample.done]:
        if environments is not None:
            running = step_environments(environments, running, prompts)
        each = [_turn_params(params, sample, rules) for sample in running]
        completions = engine.generate([sample.context for sample in running], each) if running else []
        for sample, completion in zip(running, completions, strict=True):
            sample.finish_turn(completion, rules)
            if sample.done and environments is not None:
                environments.evaluation.execute(CloseEpisode(sample.episode))
    unscored = [sample for sample in samples if sample.outcome is None]
    asked, answers = [prompts[sample.number] for sample in unscored], [sample.answer for sample in unscored]
    episodes = [] if view_episode is None else list(map(view_episode, asked, unscored))
    scored = iter(reward.score(asked, answers, episodes))
    trajectories = [sample.finished(None if sample.outcome else next(scored)) for sample in samples]
    transcript = None if environments is None else environments.transcript
    each_prompt = repeated(prompts, num_samples)
    return summarise(each_prompt, trajectories, full_marks=full_marks, transcript=transcript)


def step_environments(
    environments: Environments, samples: Sequence[Sample], prompts: Sequence[Prompt]
) -> list[Sample]:
    """Step the environments of samples until each has an observation or is done; return the former."""
    host, rules = environments.evaluation, environments.rules
    while waiting := [sample for sample in samples if sample.waits]:
        for sample in waiting:
            id = f"{sample.episode}.{len(sample.turns)}"
            host.execute(sample.next_step(id, prompts[sample.number], rules))
        for sample, reply in zip(waiting, host.collect(), strict=True):
            sample.replied(reply, rules)
            if sample.done and not (reply.done or reply.failure):
                host.execute(CloseEpisode(sample.episode))
    return [sample for sample in samples if not sample.done]


def _turn_params(params: SamplingParams, sample: Sample, rules: EpisodeRules | None) -> SamplingParams:
    if params.temperature > 0:
        turn = (len(sample.turns),) if sample.turns or sample.place else ()
        place = (sample.place,) if sample.place else ()
        params = replace(params, seed=completion_seed(params.seed, sample.number, *turn, *place))
    return params if rules is None else rules.limited(params, sample.context)


def summarise(
    prompts: Sequence[Prompt],
    trajectories: Sequence[Trajectory],
    *,
    full_marks: float,
    transcript: Callable[[Trajectory], str] | None = None,
) -> Evaluation:
    """Build an `Evaluation` from scored trajectories; one whose reward failed counts only in `failed`."""
    answers = [
        EvaluatedAnswer(
            trajectory.text,
            # An episode earns its turn rewards, too.
            replace(trajectory.outcome, value=trajectory.episode_return),
            trajectory.num_actions,
            trajectory.finish_reason,
            episode_columns(trajectory, transcript),
        )
        for trajectory in trajectories
        if trajectory.outcome is not None
    ]
    return summarise_evaluated(prompts, answers, full_marks=full_marks, metrics=episode_metrics(trajectories))


def summarise_evaluated(
    prompts: Sequence[Prompt],
    answers: Sequence[EvaluatedAnswer],
    *,
    full_marks: float,
    metrics: Mapping[str, float] | None = None,
) -> Evaluation:
    """Build an `Evaluation` from one scored answer to each prompt; `metrics` are further ones."""
    if not prompts:
        raise ValueError("there are no prompts to evaluate on")
    outcomes = [answer.outcome for answer in answers]
    scored = [outcome for outcome in outcomes if outcome.kind != "failed"]
    right = [is_right(outcome, full_marks) for outcome in outcomes]
    sources = source_metrics(prompts, outcomes, [outcome.value for outcome in outcomes], right)
    count, names, extras = max(1, len(scored)), part_names(outcomes), extra_defaults(outcomes)
    return Evaluation(
        accuracy=sum(right) / count,
        reward=sum(outcome.value for outcome in scored) / count,
        length=sum(answer.num_tokens for answer in answers) / len(prompts),
        truncated=sum(answer.finish_reason == "length" for answer in answers) / len(prompts),
        failed=1 - len(scored) / len(prompts),
        rows=[
            {
                "prompt_id": prompt.id,
                "prompt": prompt.text,
                "completion": answer.text,
                "answer": prompt.answer,
                "reward": answer.outcome.value,
                **part_columns(answer.outcome, names),
                **extra_columns(answer.outcome, extras),
                "outcome": answer.outcome.kind,
                "reason": answer.outcome.reason,
                "right": full,
                "num_tokens": answer.num_tokens,
                "finish_reason": answer.finish_reason,
                **answer.columns,
            }
            for prompt, answer, full in zip(prompts, answers, right, strict=True)
        ],
        parts=part_metrics(outcomes) | sources | dict(metrics or {}),
    )


def episode_columns(trajectory: Trajectory, transcript: Callable[[Trajectory], str] | None) -> dict[str, Any]:
    """Return the columns of an episode with an environment for a table; none for others."""
    if transcript is None:
        return {}
    return {
        "num_turns": len(trajectory.turns),
        "end": trajectory.end,
        "transcript": transcript(trajectory),
    }


def rollout_rows(
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[float],
    transcript: Callable[[Trajectory], str] | None = None,
) -> list[dict[str, Any]]:
    """Return one row for each trajectory; `advantages` belong to those whose reward did not fail."""
    rows = []
    left = iter(advantages)
    every = [t.outcome for group in groups for t in group.trajectories if t.outcome]
    names, extras = part_names(every), extra_defaults(every)
    for group in groups:
        for sample, trajectory in enumerate(group.trajectories):
            outcome = trajectory.outcome
            assert outcome is not None
            versions = [turn.completion.versions for turn in trajectory.turns]
            last = trajectory.turns[-1].completion if trajectory.turns else None
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
                    **extra_columns(outcome, extras),
                    "outcome": outcome.kind,
                    "reason": outcome.reason,
                    "num_tokens": trajectory.num_actions,
                    "finish_reason": trajectory.finish_reason,
                    "version": max((int(each[-1]) for each in versions), default=-1),
                    "oldest_version": min((int(each[0]) for each in versions), default=-1),
                    "advantage": float("nan") if outcome.kind == "failed" else next(left),
                    "token_ids": [] if last is None else list(last.token_ids),
                    # An array keeps its dtype in a table.
                    "logprobs": np.empty(0, np.float32) if last is None else last.logprobs,
                    **episode_columns(trajectory, transcript),
                }
            )
    return rows
