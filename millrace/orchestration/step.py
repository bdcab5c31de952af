"""One batch of reinforcement: sample, score, estimate, update, publish."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from millrace.algorithms.ratios import mismatch
from millrace.config.settings import RolloutConfig
from millrace.data.batch import Batch
from millrace.data.packing import pack, with_gradient, without_twins
from millrace.environments.rollout import rollout
from millrace.observability.metrics import Spans
from millrace.orchestration.evaluate import rollout_rows
from millrace.orchestration.parts import Parts
from millrace.protocols import Scorer, StepReport
from millrace.training.estimate import group_advantages, usable
from millrace.training.policy import PolicyTrainer
from millrace.types import Group, Prompt, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class BatchResult:
    """What one batch did.

    Attributes:
        record: numbers for the metrics, without times.
        rows: one for each trajectory, for a table.
        reports: of the optimizer steps.
        skipped: the packed batches whose optimizer step was skipped, as evidence.
        tokens_sampled: tokens drawn.
        tokens_trained: chosen tokens a gradient was computed for.
    """

    record: dict[str, float]
    rows: list[dict[str, Any]]
    reports: list[StepReport]
    skipped: list[Batch]
    tokens_sampled: int
    tokens_trained: int


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
    """A 64-bit seed from the run's seed and the completion's place: batch, prompt, sample, turn."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def sample_and_score(
    parts: Parts,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_samples: int,
    seed: tuple[int, int],
    spans: Spans,
) -> list[Group]:
    """Groups of scored trajectories; `seed` is (run seed, batch number)."""
    with spans("sample"):
        groups = rollout(
            prompts,
            parts.environment,
            parts.engine,
            lambda *place: replace(params, seed=completion_seed(*seed, *place)),
            num_samples=num_samples,
        )
    with spans("score"):
        # Samples of one prompt often say the same; what is said twice is judged once.
        said = list(dict.fromkeys((p, t.text) for p, g in enumerate(groups) for t in g.trajectories))
        outcomes = parts.reward.score([groups[p].prompt for p, _ in said], [text for _, text in said])
        judged = dict(zip(said, outcomes, strict=True))
        return [
            Group(g.prompt, tuple(t.scored(judged[p, t.text]) for t in g.trajectories))
            for p, g in enumerate(groups)
        ]


def train_on(
    trainer: PolicyTrainer,
    parts: Parts,
    scorer: Scorer | None,
    groups: Sequence[Group],
    *,
    divide_by_std: bool,
    num_parts: int,
    step: int,
) -> BatchResult:
    """Advantages over the whole batch, then `num_parts` optimizer steps over equal shares of its groups."""
    trajectories, group_N = usable(groups)
    advantage_N = group_advantages(trajectories, group_N, divide_by_std=divide_by_std)
    reports, skipped, differences, tokens_trained = [], [], [], 0
    share = len(groups) // num_parts
    for part in range(num_parts):
        inside = [i for i, g in enumerate(group_N.tolist()) if part * share <= g < (part + 1) * share]
        if not inside:
            continue
        whole = pack([trajectories[i] for i in inside], advantage_N[inside], parts.token_weights)
        batch = whole if scorer is not None else with_gradient(whole)
        if batch is not None:
            batch = without_twins(batch)
            if scorer is not None:
                batch.reference_logprob_T = scorer.logprobs(batch)
            logprob_N = trainer.forward_backward(batch)
            tokens_trained += int(batch.action_mask_T.sum())
            if part == 0:
                differences.append(mismatch(logprob_N.cpu(), batch.sampler_logprob_T[batch.action_mask_T]))
        reports.append(trainer.optim_step())
        if reports[-1].skipped and batch is not None:
            skipped.append(batch)
    record = _describe(groups, trajectories, group_N, advantage_N)
    record |= _averaged(reports) | {f"mismatch/{key}": value for d in differences for key, value in d.items()}
    tokens_sampled = sum(t.num_actions for group in groups for t in group.trajectories)
    record |= {"tokens/sampled": tokens_sampled, "tokens/trained": tokens_trained}
    rows = rollout_rows(step, groups, advantage_N.tolist())
    return BatchResult(record, rows, reports, skipped, tokens_sampled, tokens_trained)


def _describe(
    groups: Sequence[Group], scored: Sequence[Trajectory], group_N: Tensor, advantage_N: Tensor
) -> dict[str, float]:
    """Rewards, groups and lengths of a batch."""
    every = [trajectory for group in groups for trajectory in group.trajectories]
    kinds = [trajectory.outcome.kind for trajectory in every if trajectory.outcome]
    rewards = [trajectory.outcome.value for trajectory in scored if trajectory.outcome]
    # Where every reward failed there is no mean, and none is made up.
    count = len(rewards) or float("nan")
    mean = sum(rewards) / count
    moving = set(group_N[advantage_N != 0].tolist())
    lengths = [trajectory.num_actions for trajectory in every]
    return {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / count) ** 0.5,
        "reward/invalid_share": kinds.count("invalid") / len(kinds),
        "reward/failed_share": kinds.count("failed") / len(kinds),
        "group/equal_share": 1 - len(moving) / len(groups),
        "length/mean": sum(lengths) / len(lengths),
        "length/max": max(lengths),
        "length/truncated_share": sum(t.turns[-1].completion.finish_reason == "length" for t in every)
        / len(every),
    }


def _averaged(reports: Sequence[StepReport]) -> dict[str, float]:
    """Means over the optimizer steps that moved, the last learning rate, and how many were skipped."""
    if not reports:
        return {}
    good = [report for report in reports if not report.skipped]
    names = dict.fromkeys(name for report in good for name in report.metrics)
    averaged = {
        f"policy/{name}": sum(values) / len(values)
        for name in names
        if (values := [report.metrics[name] for report in good if name in report.metrics])
    }
    if good:
        averaged["policy/gradient_norm"] = sum(report.gradient_norm for report in good) / len(good)
    return averaged | {
        "policy/learning_rate": reports[-1].learning_rate,
        "policy/skipped_steps": len(reports) - len(good),
    }
