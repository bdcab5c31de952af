"""The training half of a batch: from scored groups to new weights.

T = packed tokens of the batch, N = trajectories (a segment for each branch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from millrace.algorithms.credit import turn_index_bias
from millrace.algorithms.kl import Divergence
from millrace.algorithms.masked import segment_sum
from millrace.algorithms.ratios import Correction, mismatch, mismatch_metrics, typical
from millrace.algorithms.shaping import overlong_penalty
from millrace.data.batch import Batch
from millrace.data.packing import TokenWeights, once_each, pack, with_gradient, without_duplicates
from millrace.planner.flops import training_operations
from millrace.planner.model_shape import ModelShape
from millrace.protocols import StepReport
from millrace.rollout.sampled_batch import (
    SampledBatch,
    completion_seed,
    episode_metrics,
    group_rewards,
    is_equal,
    part_metrics,
    source_metrics,
)
from millrace.run.evaluation import rollout_rows
from millrace.training.estimate import Estimator, Scored, turns_of, usable
from millrace.training.kl_control import KlControl
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.types import Group, Trajectory

# Segments of a batch without gradient on which trainer and sampler are still compared.
NUM_COMPARED = 8


# Log-probabilities before the step, what the ratio is taken to, advantages [N], seed -> selected tokens [N].
Selection = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Method:
    """The arithmetic of a recipe, apart from models and optimizers.

    Attributes:
        num_parts: optimizer steps a batch is divided into.
        num_epochs: passes over a batch.
        shuffled: each pass is divided in an order of its own.
        truncated: what becomes of answers that ran out of tokens: train, mask or filter.
        recompute: the ratio is taken to the trainer's own log-probabilities before the batch.
        correction: factor of a token's loss that is known before the step: of the former and the sampler's.
        bounded: which tokens have a weight outside that correction's bounds, of the same.
        selection: tokens the loss treats apart, chosen before each optimizer step over all of it.
        drop_selected: their policy loss is left out.
        multiple: the loss is a multiple of the advantage, so that a segment without one moves nothing.
        reward_divergence: estimator of the KL divergence that is taken off the rewards.
        squares: the estimator needs the sums of squared probabilities.
        bootstrap_truncated: answers that ran out of tokens go on with the critic's value.
        turn_index: credit is given by the index of turns, whose bias is measured.
        overlong_tokens: over so many tokens before `max_tokens` the reward sinks by up to `overlong_penalty`.
    """

    estimator: Estimator
    token_weights: TokenWeights
    num_parts: int
    num_epochs: int
    shuffled: bool
    truncated: Literal["train", "mask", "filter"]
    recompute: bool
    correction: Correction | None
    bounded: Correction | None
    selection: Selection | None
    drop_selected: bool
    multiple: bool
    reward_divergence: Divergence | None
    squares: bool
    greedy_baseline: bool
    bootstrap_truncated: bool
    turn_index: bool
    max_tokens: int
    overlong_tokens: int
    overlong_penalty: float


@dataclass(slots=True)
class TrainStep:
    """The models and the method that turn scored groups into new weights.

    Attributes:
        trainer: of the policy.
        method: the arithmetic of the recipe.
        critic: the value model, where the method needs one.
        reference: the reference policy of a KL penalty.
        teacher: of on-policy distillation.
        control: coefficient of the KL penalty.
        shape: of the policy, from which FLOPs are counted; None where they are not.
        stage: measures a part of the training of a batch, by its name.
        after_advantages: called with the packed batch before its first optimizer step.
        before_optimizer_step: called with the packed batch of an optimizer step when its gradient is there.
    """

    trainer: PolicyTrainer
    method: Method
    critic: ValueTrainer | None = None
    reference: ModelScorer | None = None
    teacher: ModelScorer | None = None
    control: KlControl | None = None
    shape: ModelShape | None = None
    stage: Callable[[str], AbstractContextManager[object]] = nullcontext
    after_advantages: Callable[[Batch], None] | None = None
    before_optimizer_step: Callable[[Batch], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Log-probabilities of trainer and sampler for the same tokens, before the first update of a batch.

    Attributes:
        batch: has the sampler's log-probabilities.
        trainer_logprob_N: the trainer's, of the chosen tokens.
        num_current: number of chosen tokens in segments sampled entirely by the trainer's current policy
            version.
    """

    batch: Batch
    trainer_logprob_N: Tensor
    num_current: int


@dataclass(frozen=True, slots=True, eq=False)
class BatchResult:
    """The result of training on one batch.

    Attributes:
        record: metrics, without times.
        rows: one for each trajectory, for the rollout table.
        reports: of the optimizer steps.
        batch: the packed batch; None where no group was trained on.
        compared: what was compared with the sampler's log-probabilities; None likewise.
        skipped: the packed batches whose optimizer step was skipped, as evidence.
        tokens_sampled: number of generated tokens.
        tokens_trained: number of chosen tokens with a gradient.
        operations: FLOPs of policy and critic, forward and backward, over all ranks; 0 where not counted.
    """

    record: dict[str, float]
    rows: list[dict[str, Any]]
    reports: list[StepReport]
    batch: Batch | None
    compared: Compared | None
    skipped: list[Batch]
    tokens_sampled: int
    tokens_trained: int
    operations: int


def train_on(
    train_step: TrainStep,
    sampled: SampledBatch,
    *,
    seed: int,
    step: int,
    policy_moves: bool = True,
    transcript: Callable[[Trajectory], str] | None = None,
) -> BatchResult:
    """Compute advantages over the whole batch, then do optimizer steps over equal slices of its groups.

    Args:
        train_step: what is trained.
        sampled: scored groups. A group whose greedy baseline is missing is left out.
        seed: of the run.
        step: number of this batch, counted from 1.
        policy_moves: False trains only the critic.
        transcript: returns the text of an episode with an environment.
    """
    groups, baselines = sampled.groups, sampled.baselines
    kept, method = _kept(sampled), train_step.method
    every, group_of_every = usable(groups)
    inside = torch.isin(group_of_every, torch.tensor(kept, dtype=torch.long)).nonzero()[:, 0].tolist()
    if method.truncated == "filter":
        inside = [n for n in inside if every[n].finish_reason != "length"]
    trajectories, group_N = [every[i] for i in inside], group_of_every[inside]
    whole = estimated(train_step, trajectories, group_N, len(groups), baselines) if trajectories else None
    done = _Done()
    for part, members in enumerate(_minibatches(method, kept, trajectories, group_N, (seed, step))):
        if not members or whole is None:
            continue
        with train_step.stage("pack"):
            batch = one_step(method, whole, members)
            _count_bounded(method, batch, done)
        if train_step.critic is not None:
            with train_step.stage("critic"):
                _update_critic(train_step.critic, train_step.shape, batch, done)
        if policy_moves:
            with train_step.stage("policy"):
                _update(train_step, batch, completion_seed(seed, step, part), done)
    record = _describe(groups) | _of_steps(done)
    record |= _steer(train_step, whole, record) | _credit(method, whole, trajectories)
    if sampled.num_rounds:
        record["group/dynamic_sampling_rounds"] = sampled.num_rounds
    tokens_sampled = sampled.num_greedy_tokens + sum(t.num_actions for g in groups for t in g.trajectories)
    record |= {"tokens/sampled": tokens_sampled, "tokens/trained": done.tokens_trained}
    advantage_of = dict(zip(inside, _advantages(whole), strict=True))
    shown = [advantage_of.get(i, math.nan) for i in range(len(every))]
    return BatchResult(
        record,
        rollout_rows(step, groups, shown, transcript),
        done.reports,
        whole,
        done.compared,
        done.skipped,
        tokens_sampled,
        done.tokens_trained,
        done.operations,
    )


def _kept(sampled: SampledBatch) -> list[int]:
    """Indices of the groups that are trained on."""
    baselines = sampled.baselines
    return [
        g
        for g in range(len(sampled.groups))
        if g not in sampled.left_out and not (baselines and math.isnan(baselines[g]))
    ]


@dataclass(slots=True)
class _Done:
    """Accumulated results of a batch's optimizer steps."""

    reports: list[StepReport] = field(default_factory=list)
    critic_reports: list[StepReport] = field(default_factory=list)
    skipped: list[Batch] = field(default_factory=list)
    mismatch: dict[str, float] = field(default_factory=dict)
    compared: Compared | None = None
    num_corrected: int = 0
    num_bounded: int = 0
    tokens_trained: int = 0
    operations: int = 0


def _of_steps(done: _Done) -> dict[str, float]:
    """Metrics of the optimizer steps of a batch."""
    record = _averaged(done.reports, "policy") | _averaged(done.critic_reports, "critic") | done.mismatch
    if done.num_corrected:
        record["policy/correction_clip_fraction"] = done.num_bounded / done.num_corrected
    return record


def _operations(shape: ModelShape | None, batch: Batch, *, num_predicted: int) -> int:
    """FLOPs of a forward and a backward over a batch; 0 where they are not counted."""
    return 0 if shape is None else training_operations(shape, batch.length_B.tolist(), num_predicted)


def _minibatches(
    method: Method,
    kept: list[int],
    trajectories: Sequence[Trajectory],
    group_N: Tensor,
    seeds: tuple[int, int],
) -> Iterator[list[int]]:
    """The trajectories of each optimizer step of a batch, pass after pass; `seeds` are of run and batch."""
    masks = method.truncated == "mask"
    masked = {n for n, one in enumerate(trajectories) if masks and one.finish_reason == "length"}
    for epoch in range(method.num_epochs):
        order = kept
        if method.shuffled:
            # Samples count from 0, so no other random choice of the run has this seed.
            generator = torch.Generator().manual_seed(completion_seed(*seeds, -1, epoch))
            order = [kept[place] for place in torch.randperm(len(kept), generator=generator).tolist()]
        for members in _parts(order, group_N, method.num_parts):
            yield [n for n in members if n not in masked]


def _parts(kept: list[int], group_N: Tensor, num_parts: int) -> list[list[int]]:
    """The trajectories of each optimizer step: equal slices of the kept groups, in order."""
    bounds = [len(kept) * part // num_parts for part in range(num_parts + 1)]
    step_of = {g: part for part in range(num_parts) for g in kept[bounds[part] : bounds[part + 1]]}
    members: list[list[int]] = [[] for _ in range(num_parts)]
    for n, g in enumerate(group_N.tolist()):
        members[step_of[g]].append(n)
    return members


def _update_critic(critic: ValueTrainer, shape: ModelShape | None, batch: Batch, done: _Done) -> None:
    """Do one optimizer step of the critic."""
    valued = without_duplicates(batch)
    critic.forward_backward(valued)
    done.operations += _operations(shape, valued, num_predicted=0)
    done.critic_reports.append(critic.optim_step())


def _update(train_step: TrainStep, batch: Batch, seed: int, done: _Done) -> None:
    """Do one optimizer step of the policy."""
    moving = moving_part(train_step, batch, seed)
    compared = moving
    if moving is not None:
        logprob_N = train_step.trainer.forward_backward(moving)
        num_chosen = int(moving.action_mask_T.sum())
        done.tokens_trained += num_chosen
        done.operations += _operations(train_step.shape, moving, num_predicted=num_chosen)
    elif not done.reports:
        # A broken sampler can make all rewards equal, so a batch without gradient must be compared too.
        compared = batch.select(list(range(min(NUM_COMPARED, batch.num_segments))))
        logprob_N = train_step.trainer.scorer.logprobs(compared)[compared.action_mask_T]
    if compared is not None and not done.reports:
        # After the first update, the difference would also contain the update itself.
        done.mismatch, num_current = _mismatch(logprob_N, compared, train_step.trainer.version)
        done.compared = Compared(compared, logprob_N, num_current)
    if train_step.before_optimizer_step is not None:
        train_step.before_optimizer_step(batch)
    done.reports.append(train_step.trainer.optim_step())
    if done.reports[-1].skipped and moving is not None:
        done.skipped.append(moving)


def estimated(
    train_step: TrainStep,
    trajectories: Sequence[Trajectory],
    group_N: Tensor,
    num_groups: int,
    baselines: Sequence[float] | None,
) -> Batch:
    """Pack a batch and compute everything that precedes the first update, such as its advantages."""
    method, stage = train_step.method, train_step.stage
    with stage("pack"):
        batch, turns = pack(trajectories), turns_of(trajectories)
    reward_N = torch.tensor([t.episode_return for t in trajectories], dtype=torch.float64)
    # The last turn of a trajectory ends its last branch.
    last_N = torch.bincount(batch.unit_T).cumsum(0) - 1
    if method.overlong_tokens:
        length_N = torch.tensor([len(t.turns[-1].completion.token_ids) for t in trajectories])
        penalty_N = overlong_penalty(length_N, max_tokens=method.max_tokens, buffer=method.overlong_tokens)
        penalty_N = penalty_N * method.overlong_penalty
        reward_N = reward_N + penalty_N
        final_reward_N = torch.tensor([t.turn_rewards[-1] for t in trajectories], dtype=torch.float64)
        batch.reward_T[last_N] = (final_reward_N + penalty_N).float()
    # Equal sequences have equal log-probabilities, so each is computed once.
    with stage("pack"):
        small, place_T = once_each(batch)
    square_T, teacher_logprob_T = _read_models(train_step, batch, small, place_T)
    final_N = None
    if train_step.critic is not None:
        with stage("values"):
            value_T, final_B = train_step.critic.values(small)
        batch.value_T = value_T[place_T]
        cut_N = torch.tensor([t.turns[-1].completion.finish_reason == "length" for t in trajectories])
        if method.bootstrap_truncated:
            final_N = final_B[small.segment_T[place_T[last_N]]] * cut_N
    if method.reward_divergence is not None and train_step.control is not None:
        assert batch.reference_logprob_T is not None
        divergence_T = method.reward_divergence(batch.sampler_logprob_T, batch.reference_logprob_T)
        cost_T = train_step.control.coefficient * divergence_T * batch.action_mask_T
        batch.reward_T = batch.reward_T - cost_T
        reward_N = reward_N.index_add(0, batch.unit_T, -cost_T.double())
        turn_cost_T = batch.chosen.take(cost_T).double()
        turns = replace(turns, reward_U=turns.reward_U.index_add(0, turns.turn_T, -turn_cost_T))
    scored = Scored(
        batch,
        reward_N,
        group_N,
        num_groups,
        component_KN=_components(trajectories),
        baseline_N=None if baselines is None else torch.tensor(baselines, dtype=torch.float64)[group_N],
        final_value_N=final_N,
        square_T=square_T,
        teacher_logprob_T=teacher_logprob_T,
        turns=turns,
    )
    with stage("advantage"):
        advantage_N, return_N = method.estimator(scored)
        batch.advantage_T = scored.chosen.put(advantage_N.float())
        batch.return_T = None if return_N is None else scored.chosen.put(return_N.float())
    if train_step.after_advantages is not None:
        train_step.after_advantages(batch)
    return batch


def _read_models(
    train_step: TrainStep, batch: Batch, small: Batch, place_T: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Read log-probabilities before the step: reference and proximal into the batch; squares, teacher's."""
    method, stage = train_step.method, train_step.stage
    if train_step.reference is not None:
        with stage("reference"):
            batch.reference_logprob_T = train_step.reference.logprobs(small)[place_T]
    square_T, teacher_logprob_T = None, None
    if method.recompute or method.squares:
        with stage("old_logprobs"):
            if method.recompute:
                batch.proximal_logprob_T = train_step.trainer.scorer.logprobs(small)[place_T]
            if method.squares:
                square_T = train_step.trainer.scorer.squares(small)[place_T]
    if train_step.teacher is not None:
        with stage("teacher"):
            teacher_logprob_T = train_step.teacher.logprobs(small)[place_T]
    return square_T, teacher_logprob_T


def one_step(method: Method, whole: Batch, members: list[int]) -> Batch:
    """Select the trajectories of one optimizer step, with their token weights and corrections."""
    if whole.episode_T is not None:
        inside_T = torch.isin(whole.episode_T, torch.tensor(members))
        members = whole.segment_T[inside_T].unique().tolist()
    batch = whole if len(members) == whole.num_segments else whole.select(members)
    batch = replace(batch, weight_T=method.token_weights(batch.action_mask_T, batch.unit_T))
    if method.correction is not None:
        mask_T = batch.action_mask_T
        factor_N = method.correction(*_before_step(batch))
        batch.correction_T = factor_N.new_ones(len(mask_T)).masked_scatter(mask_T, factor_N)
    return batch


def moving_part(train_step: TrainStep, batch: Batch, seed: int) -> Batch | None:
    """The part of an optimizer step's batch that has a gradient, without duplicates; None if it is empty."""
    method, mask_T = train_step.method, batch.action_mask_T
    if method.selection is not None:
        small, place_T = once_each(batch)
        logprob_N = train_step.trainer.scorer.logprobs(small)[place_T][mask_T]
        start_T = batch.sampler_logprob_T if batch.proximal_logprob_T is None else batch.proximal_logprob_T
        selected_N = method.selection(logprob_N, start_T[mask_T], batch.advantage_T[mask_T], seed)
        selected_T = torch.zeros_like(mask_T).masked_scatter(mask_T, selected_N)
        if method.drop_selected:
            kept_T = (~selected_T).to(batch.weight_T.dtype)
            factor_T = kept_T if batch.correction_T is None else batch.correction_T * kept_T
            batch = replace(batch, correction_T=factor_T)
        else:
            batch = replace(batch, selected_T=selected_T)
    moving = with_gradient(batch) if method.multiple else batch
    return None if moving is None else without_duplicates(moving)


def _credit(method: Method, whole: Batch | None, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The bias of credit by turn index, from rewards with their penalties."""
    if whole is None or not method.turn_index:
        return {}
    turns = turns_of(trajectories)
    reward_T = whole.chosen.take(whole.reward_T).double()
    reward_U = segment_sum(reward_T, turns.turn_T, len(turns.reward_U))
    return {"credit/turn_index_bias": turn_index_bias(replace(turns, reward_U=reward_U))}


def _components(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """The components of the reward, [K, N]; None where there is only one, or sources have their own."""
    names = list(trajectories[0].outcome.parts) if trajectories[0].outcome else []
    if len(names) < 2 or any(t.outcome and list(t.outcome.parts) != names for t in trajectories):
        return None
    return torch.tensor(
        [[t.outcome.parts[name] for t in trajectories if t.outcome] for name in names], dtype=torch.float64
    )


def _mismatch(logprob_N: Tensor, batch: Batch, version: int) -> tuple[dict[str, float], int]:
    """Compare the trainer's log-probabilities with the sampler's, before the first update.

    Args:
        logprob_N: the trainer's, of the chosen tokens.
        batch: has the sampler's.
        version: policy version of the trainer. Where older versions sampled some of the tokens, the others
            are also compared by themselves: there the difference is numerical only.

    Returns:
        The metrics, and the number of tokens behind `current`: those of segments that this version sampled
        entirely, because later tokens also depend on keys and values that an engine kept from older weights.
    """
    mask_T = batch.action_mask_T
    trainer_N, sampler_N = logprob_N.cpu(), batch.sampler_logprob_T[mask_T]
    found = mismatch_metrics(trainer_N, sampler_N, batch.segment_T[mask_T], batch.num_segments)
    fresh_N = batch.version_T[mask_T] == version
    if fresh_N.any() and not fresh_N.all():
        fresh = mismatch(trainer_N[fresh_N], sampler_N[fresh_N])
        found |= {"fresh_mean": fresh["mean"], "fresh_max": fresh["max"]}
    segment_N = batch.segment_T[mask_T]
    num_older_B = torch.bincount(segment_N[~fresh_N], minlength=batch.num_segments)
    current_N = num_older_B[segment_N] == 0
    num_current = int(current_N.sum())
    if num_current:
        found["current"] = typical(trainer_N[current_N] - sampler_N[current_N])
    return {f"mismatch/{key}": value for key, value in found.items()}, num_current


def _count_bounded(method: Method, batch: Batch, done: _Done) -> None:
    """Count the tokens whose importance weight was truncated by the correction's bounds."""
    if method.bounded is None:
        return
    outside_N = method.bounded(*_before_step(batch))
    done.num_corrected += len(outside_N)
    done.num_bounded += int(outside_N.sum())


def _before_step(batch: Batch) -> tuple[Tensor, Tensor, Tensor, int]:
    """What a correction is computed of: log-probabilities of proximal and sampler, and segments."""
    assert batch.proximal_logprob_T is not None
    mask_T = batch.action_mask_T
    return (
        batch.proximal_logprob_T[mask_T],
        batch.sampler_logprob_T[mask_T],
        batch.segment_T[mask_T],
        batch.num_segments,
    )


def _steer(train_step: TrainStep, whole: Batch | None, record: dict[str, float]) -> dict[str, float]:
    """Adapt the KL penalty's coefficient to the divergence of this batch."""
    control, method = train_step.control, train_step.method
    if control is None or whole is None:
        return {}
    used = control.coefficient
    found = {}
    divergence = record.get("policy/kl_reference")
    if method.reward_divergence is not None:
        assert whole.reference_logprob_T is not None
        divergence_T = method.reward_divergence(whole.sampler_logprob_T, whole.reference_logprob_T)
        divergence = float(divergence_T[whole.action_mask_T].mean())
        found["policy/kl_reference"] = divergence
    if divergence is not None and math.isfinite(divergence):
        control.update(divergence, len(whole.chosen.length_B))
    return found | {"policy/kl_coefficient": used}


def _advantages(whole: Batch | None) -> list[float]:
    """Mean advantage over each trajectory's tokens."""
    if whole is None:
        return []
    count_N = whole.chosen.length_B
    total_N = torch.zeros(len(count_N), dtype=torch.float64)
    total_N = total_N.index_add(0, whole.unit_T, whole.advantage_T.double())
    mean_N: list[float] = (total_N / count_N.clamp(min=1)).tolist()
    return mean_N


def _describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a batch's rewards, groups and lengths."""
    every = [trajectory for group in groups for trajectory in group.trajectories]
    kinds = [trajectory.outcome.kind for trajectory in every if trajectory.outcome]
    rewards = [reward for group in groups for reward in group_rewards(group)]
    # Where every reward failed, the mean is NaN.
    count, least = len(rewards) or math.nan, min(rewards, default=math.nan)
    # Relative to the least, since the mean of equal rewards is rounded and their deviation must be 0.
    above = [reward - least for reward in rewards]
    mean = sum(above) / count
    lengths = [trajectory.num_actions for trajectory in every]
    return {
        "reward/mean": least + mean,
        **part_metrics([trajectory.outcome for trajectory in every if trajectory.outcome]),
        **_by_source(groups),
        "reward/std": (sum((one - mean) ** 2 for one in above) / count) ** 0.5,
        "reward/invalid_fraction": kinds.count("invalid") / len(kinds),
        "reward/failed_fraction": kinds.count("failed") / len(kinds),
        "group/zero_std_fraction": sum(map(is_equal, groups)) / len(groups),
        "length/mean": sum(lengths) / len(lengths),
        "length/max": max(lengths),
        "length/truncated_fraction": sum(t.finish_reason == "length" for t in every) / len(every),
        **episode_metrics(every),
    }


def _by_source(groups: Sequence[Group]) -> dict[str, float]:
    with_source = [group for group in groups if group.prompt.source]
    pairs = [(group.prompt, t, t.outcome) for group in with_source for t in group.trajectories if t.outcome]
    return source_metrics(
        [prompt for prompt, _, _ in pairs],
        [outcome for _, _, outcome in pairs],
        [trajectory.episode_return for _, trajectory, _ in pairs],
    )


def _averaged(reports: Sequence[StepReport], whose: str) -> dict[str, float]:
    """Means over the steps that were not skipped, the last learning rate, and the number of skipped steps."""
    if not reports:
        return {}
    good = [report for report in reports if not report.skipped]
    names = dict.fromkeys(name for report in good for name in report.metrics)
    averaged = {
        f"{whose}/{name}": sum(values) / len(values)
        for name in names
        if (values := [report.metrics[name] for report in good if name in report.metrics])
    }
    if good:
        averaged[f"{whose}/grad_norm"] = sum(report.grad_norm for report in good) / len(good)
    return averaged | {
        f"{whose}/learning_rate": reports[-1].learning_rate,
        f"{whose}/skipped_steps": len(reports) - len(good),
    }
