"""Numerical equivalence checks across layouts, for `millrace doctor --numerics`.

Every check runs on the recipe's own model, data, advantages and loss, on one small batch that it samples. An
untrained policy has equal rewards and the sampler's weights, so every ratio would be 1 and no bound or
penalty would act. Therefore rewards and advantages are sampled by seed, and the weights are perturbed.

T = packed tokens of the batch, N = trajectories.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from millrace.config.method_sections import SCANNED
from millrace.config.rollout_section import synchronous
from millrace.config.settings import RunConfig
from millrace.data.batch import Batch
from millrace.data.packing import once_each, pack, without_duplicates
from millrace.engines.in_process import InProcessBackend
from millrace.errors import SetupError
from millrace.kernels.dispatch import Scan
from millrace.models.load import Model
from millrace.rollout.batches import as_sampled, rollouts_of
from millrace.rollout.sampled_batch import SampledBatch
from millrace.run.build import build
from millrace.run.build_algorithm import build_estimator
from millrace.run.build_source import build_stream
from millrace.run.components import Components
from millrace.run.health.health_checks import check_failures
from millrace.run.progress import Progress
from millrace.run.train_step import TrainStep, estimated, moving_part, one_step
from millrace.training.estimate import usable
from millrace.types import Trajectory

MOST_PROMPTS = 8
# Largest relative rounding error of gradient and loss; of a log-probability, ten times as much.
ALLOWED = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 5e-2}
# Advantages are always float32.
ALLOWED_SCAN = 1e-5
# Size of the perturbation, relative to the mean weight: moves log-probabilities of small models by about 0.1.
SHAKEN = 0.05
# Optimizer steps that the perturbation replaces.
VERSION = 2


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one comparison.

    Attributes:
        name: the quantity, and the change that must not affect it.
        difference: measured difference.
        allowed: largest difference that rounding explains.
        unit: of both.
    """

    name: str
    difference: float
    allowed: float
    unit: str

    @property
    def passed(self) -> bool:
        """Whether rounding explains the difference; a NaN does not pass."""
        return self.difference <= self.allowed


def check_numerics(config: RunConfig) -> list[Check]:
    """Run every check on a recipe.

    Raises:
        SetupError: the recipe has no reinforcement, or cannot be built on this machine.
        RunStopped: too many rewards failed.
        ValueError: a DataError, ModelError or RewardError; its message names the fix.
    """
    if config.steps == 0:
        raise SetupError(
            "steps is 0, so there is no reinforcement whose numbers could be checked; set steps=1"
        )
    few = min(MOST_PROMPTS, config.rollout.prompts_per_step)
    rollout = synchronous(config.rollout).model_copy(
        update={"prompts_per_step": few, "dynamic_sampling_rounds": 0}
    )
    policy = config.policy.model_copy(
        update={"optimizer_steps_per_batch": 1, "epochs_per_batch": 1, "shuffle_minibatches": False}
    )
    # The numbers of a batch do not depend on which engine sampled it, nor on other batches.
    engine = config.engine.model_copy(update={"num_engines": None, "kind": "millrace"})
    config = config.model_copy(update={"rollout": rollout, "policy": policy, "engine": engine})
    components = build(config, None)
    with closing(components):
        train_step = _train_step(components)
        data = config.data.model_copy(update={"curriculum": None})
        stream = build_stream(data, components, Progress(stage="reinforcement"), seed=config.seed)
        backend = InProcessBackend(components.engine, components.reward, lambda version: None)
        limit_s = config.timeouts.phase_s
        rollouts = rollouts_of(
            config.rollout, components, stream, backend, seed=config.seed, num_batches=1, limit_s=limit_s
        )
        rollouts.begin(components.engine.version)
        sampled = as_sampled(rollouts.next_batch(limit_s))
    _check_rewards(sampled, limit=config.limits.failed_rewards)
    trajectories, group_N = usable(sampled.groups)
    allowed = ALLOWED[config.precision]
    checks = _sampling_checks(train_step, pack(trajectories), allowed)

    _shake(train_step, config.seed)
    trajectories = _with_random_rewards(trajectories, config.seed)
    baselines = None if sampled.baselines is None else [0.25] * len(sampled.groups)
    rest = trajectories, group_N, len(sampled.groups), baselines
    if config.advantage.kind not in SCANNED:
        whole = estimated(train_step, *rest)
    else:
        # For such a short row, `auto` is the plain loop, which would be compared with itself.
        whole = estimated(_scanning(train_step, config, "numba"), *rest)
        loop = estimated(_scanning(train_step, config, "loop"), *rest)
        away = _relative(whole.advantage_T - loop.advantage_T, loop.advantage_T)
        checks.append(Check("advantages: the scan = a plain loop", away, ALLOWED_SCAN, "of their norm"))

    _shake(train_step, config.seed + 1)
    # One sequence is duplicated, so that there is something to merge.
    whole = whole.select([0, *range(whole.num_segments)])
    whole.advantage_T = _random_advantages(whole, config.seed)
    batch = one_step(train_step.method, whole, list(range(int(whole.unit_T[-1]) + 1)))
    return checks + list(_layout_checks(train_step, batch, allowed))


def _train_step(components: Components) -> TrainStep:
    """Build everything that is trained, at the recipe's initial weights."""
    reference = None
    if components.reference is not None:
        with tempfile.TemporaryDirectory() as folder:
            components.save_model(Path(folder))
            reference = components.reference(Path(folder))
    trainer = components.reinforcer(VERSION, components.control, reference)
    critic = components.critic() if components.critic else None
    return TrainStep(trainer, components.method, critic, reference, components.teacher, components.control)


def _scanning(train_step: TrainStep, config: RunConfig, scan: Scan) -> TrainStep:
    """Return the train step with this implementation of scans."""
    estimator = build_estimator(config.advantage, config.rewards, scan)
    return replace(train_step, method=replace(train_step.method, estimator=estimator))


def _check_rewards(sampled: SampledBatch, *, limit: float) -> None:
    """Stop where training would: without rewards, no method can be checked.

    Args:
        sampled: scored.
        limit: fraction of rewards that may fail.

    Raises:
        RunStopped: too many rewards failed.
    """
    outcomes = [t.outcome for group in sampled.groups for t in group.trajectories if t.outcome]
    failed = [outcome.reason for outcome in outcomes if outcome.kind == "failed"]
    check_failures(len(failed) / len(outcomes), limit=limit, reason="".join(failed[:1]), of="this batch")


def _sampling_checks(train_step: TrainStep, batch: Batch, allowed: float) -> list[Check]:
    """Compare the sampler with the trainer, and one packed row with a row for each sequence."""
    scorer, mask_T = train_step.trainer.scorer, batch.action_mask_T
    trainer_T = scorer.logprobs(batch)
    alone_T = torch.cat([scorer.logprobs(batch.select([b])) for b in range(batch.num_segments)])
    others = {
        "sampler's log-probabilities = trainer's": batch.sampler_logprob_T,
        "log-probabilities: one row of all = each alone": alone_T,
    }
    return [
        Check(name, float((trainer_T - other_T)[mask_T].abs().max()), 10 * allowed, "nats, the largest")
        for name, other_T in others.items()
    ]


def _layout_checks(train_step: TrainStep, batch: Batch, allowed: float) -> Iterator[Check]:
    """Compare loss and gradients of one optimizer step under equivalent splits and orders."""
    moving = moving_part(train_step, batch, 0)
    assert moving is not None
    layouts: dict[str, Sequence[Batch]] = {}
    if train_step.method.selection is not None:
        # The selection belongs to the optimizer step, so it is fixed from here on.
        batch = moving
    else:
        layouts["equal sequences merged"] = [without_duplicates(batch)]
        if train_step.method.multiple:
            layouts["those without advantage left out"] = [moving]
    order = torch.randperm(batch.num_segments, generator=torch.Generator().manual_seed(1)).tolist()
    half = max(int(batch.length_B.max()), -(-batch.num_tokens // 2))
    layouts |= {
        "micro-batches of half the tokens": list(batch.split(half)),
        "a micro-batch for each sequence": [batch.select([b]) for b in range(batch.num_segments)],
        "another packing order": [batch.select(order)],
    }
    if batch.num_segments > 1:
        layouts["two ranks"] = [batch.shard(rank, 2) for rank in range(2)]
    loss, gradient = _loss_and_gradient(train_step, [batch])
    scale = max(abs(loss), float((batch.weight_T * batch.advantage_T.abs()).sum()))
    for name, pieces in layouts.items():
        other_loss, other = _loss_and_gradient(train_step, pieces)
        yield Check(f"loss: {name}", abs(other_loss - loss) / scale, allowed, "of the loss")
        away = _relative(other - gradient, gradient)
        yield Check(f"gradient: {name}", away, allowed, "of its norm")
        if train_step.critic is not None and pieces is not layouts.get("those without advantage left out"):
            expected, found = _critic_gradient(train_step, [batch]), _critic_gradient(train_step, pieces)
            yield Check(
                f"critic's gradient: {name}", _relative(found - expected, expected), allowed, "of its norm"
            )


def _loss_and_gradient(train_step: TrainStep, pieces: Sequence[Batch]) -> tuple[float, Tensor]:
    trainer = train_step.trainer
    for piece in pieces:
        trainer.forward_backward(piece)
    gradient = _gradient(trainer.model)
    return trainer.discard()["loss"], gradient


def _critic_gradient(train_step: TrainStep, pieces: Sequence[Batch]) -> Tensor:
    critic = train_step.critic
    assert critic is not None
    for piece in pieces:
        critic.forward_backward(piece)
    gradient = _gradient(critic.model)
    critic.optimizer.zero_grad()
    return gradient


def _gradient(model: Model) -> Tensor:
    gradients = [
        weight.grad.double().flatten().cpu() for weight in model.parameters() if weight.grad is not None
    ]
    return torch.cat(gradients)


def _relative(difference: Tensor, whole: Tensor) -> float:
    """Norm of a difference relative to the norm of `whole`; absolute where that is 0."""
    return float(difference.norm()) / (float(whole.norm()) or 1.0)


def _shake(train_step: TrainStep, seed: int) -> None:
    """Perturb all trainable weights, as optimizer steps would."""
    generator = torch.Generator().manual_seed(seed)
    models = [train_step.trainer.model] + ([train_step.critic.model] if train_step.critic else [])
    with torch.no_grad():
        for weight in (weight for model in models for weight in model.parameters()):
            # The clamp also moves a critic's head, which is initialized with zeros.
            size = SHAKEN * weight.abs().mean().clamp(min=0.1)
            weight += size * torch.randn(weight.shape, generator=generator).to(weight)


def _with_random_rewards(trajectories: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """The same trajectories with random rewards; equal trajectories have equal rewards."""
    rescored = []
    for one in trajectories:
        assert one.outcome is not None
        turns = [(turn.observation, turn.completion.token_ids) for turn in one.turns]
        value = random.Random(repr((seed, turns))).gauss(0.0, 1.0)
        rescored.append(one.scored(replace(one.outcome, value=value)))
    return rescored


def _random_advantages(batch: Batch, seed: int) -> Tensor:
    """A random advantage for each chosen token, equal in equal sequences, 0 in every fourth sequence."""
    small, place_T = once_each(batch)
    random_T = torch.randn(small.num_tokens, generator=torch.Generator().manual_seed(seed))
    random_T[small.segment_T % 4 == 3] = 0
    return random_T[place_T] * batch.action_mask_T
