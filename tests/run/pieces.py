"""Recipes without files, learners over tiny models, and scored groups, which tests of `run` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from millrace.config.recipe import validate
from millrace.config.settings import RunConfig
from millrace.data.batch import Batch
from millrace.models.heads import scalar_model
from millrace.rollout.sampled_batch import SampledBatch, is_equal
from millrace.run.build_algorithm import build_control, build_method, build_objective
from millrace.run.components import Components
from millrace.run.train_step import BatchResult, TrainStep, estimated, train_on
from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.types import Group, Outcome, Prompt, Trajectory, Turn
from tests.training.pieces import completion, tiny_model, trajectory

# Rewards of four groups of two, the advantage and the policy of most tests.
GROUPS = ([1.0, 0.0], [4.0, 1.0], [0.0, 2.0], [1.0, 5.0])
CENTRED = {"divide_by_std": False}
TWO = {"optimizer_steps_per_batch": 2}


def recipe(**sections: Any) -> RunConfig:
    """A recipe whose data nobody reads."""
    tree = {"steps": 9, "data": {"train": "none.jsonl"}, "rewards": [{"kind": "exact"}]}
    return validate(tree | sections, "test")


def parts(**given: Any) -> Components:
    names = {field.name: None for field in fields(Components)}
    return Components(**names | {"stop_token_ids": (0,), "group_filter": is_equal} | given)


def reference(seed: int = 9, dtype: torch.dtype = torch.float32) -> ModelScorer:
    return ModelScorer(tiny_model(seed, dtype), temperature=1.0, max_tokens=1000)


def make_train_step(
    config: RunConfig, *, max_tokens: int = 1000, teacher: ModelScorer | None = None
) -> TrainStep:
    """What `build` would make of a recipe, over tiny models; the reference is not where the policy begins."""
    control = build_control(config.policy.kl)
    frozen = reference() if control else None
    model = tiny_model()
    trainer = PolicyTrainer(
        model,
        build_objective(config.policy, control, config.steps),
        adamw(model, betas=(0.9, 0.999), weight_decay=0.0),
        learning_rate=lambda number: 0.01,
        temperature=config.rollout.temperature,
        max_tokens=max_tokens,
        max_grad_norm=1.0,
        reference=frozen if config.policy.kl and config.policy.kl.estimator == "full" else None,
    )
    return TrainStep(trainer, build_method(config), critic(config), frozen, teacher, control)


def critic(config: RunConfig) -> ValueTrainer | None:
    if config.critic is None:
        return None
    model = scalar_model(tiny_model(4))
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(4))
    return ValueTrainer(
        model,
        adamw(model, betas=(0.9, 0.999), weight_decay=0.0),
        learning_rate=lambda number: 0.01,
        clip=config.critic.clip,
        coefficient=config.critic.coefficient,
        max_tokens=1000,
        max_grad_norm=1.0,
    )


def watched(trainer: PolicyTrainer | ValueTrainer) -> list[Batch]:
    """The batches that a trainer will be given."""
    batches: list[Batch] = []
    real = trainer.forward_backward

    def recording(batch: Batch) -> Any:
        batches.append(batch)
        return real(batch)

    trainer.forward_backward = recording
    return batches


def scored(*rewards: Sequence[float | None], logprob: float = -3.0) -> list[Group]:
    """Groups with these rewards; sample s of group g answers g + 1 tokens, the first of them 4 g + s + 1."""
    made = []
    for g, values in enumerate(rewards):
        trajectories = []
        for s, value in enumerate(values):
            answer = (4 * g + s + 1, *([3] * g))
            outcome = Outcome.failure("it hung") if value is None else Outcome("score", value)
            drawn = trajectory((5, 6), answer, logprobs=[logprob - 0.1 * t for t in range(g + 1)])
            trajectories.append(drawn.scored(outcome))
        made.append(Group(Prompt(f"train:{g}", (5, 6), "text"), tuple(trajectories)))
    return made


def group_of(*answers: tuple[tuple[int, ...], float], cut: tuple[int, ...] = ()) -> Group:
    """Answers with their rewards; those at the places in `cut` ran out of tokens."""
    made = []
    for place, (answer, reward) in enumerate(answers):
        drawn = completion(*answer, logprobs=[-2.0 - 0.3 * t for t in range(len(answer))])
        if place in cut:
            drawn = replace(drawn, finish_reason="length")
        made.append(Trajectory((Turn((5, 6), drawn),), Outcome("score", reward)))
    return Group(Prompt("train:0", (5, 6), "text"), tuple(made))


def before_update(one: TrainStep, *groups: Group, baselines: list[float] | None = None) -> Batch:
    """The whole packed batch with all that is computed of it."""
    members = [(t, g) for g, group in enumerate(groups) for t in group.trajectories]
    group_N = torch.tensor([g for _, g in members])
    return estimated(one, [t for t, _ in members], group_N, len(groups), baselines)


def run(
    one: TrainStep,
    groups: list[Group],
    *,
    baselines: list[float] | None = None,
    left_out: Sequence[int] = (),
    policy_moves: bool = True,
    step: int = 3,
) -> BatchResult:
    sampled = SampledBatch(groups, frozenset(left_out), baselines)
    return train_on(one, sampled, seed=5, step=step, policy_moves=policy_moves)


def first_actions(batch: Batch) -> list[int]:
    """The first chosen token of each segment."""
    return [
        int(batch.token_T[(batch.segment_T == b) & batch.action_mask_T][0]) for b in range(batch.num_segments)
    ]


def per_segment(batch: Batch, name: str) -> list[list[float]]:
    """A field's numbers at the chosen tokens of each segment."""
    column_T = getattr(batch, name)
    return [
        column_T[(batch.segment_T == b) & batch.action_mask_T].tolist() for b in range(batch.num_segments)
    ]


def weight_bits(trainer: PolicyTrainer | ValueTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
