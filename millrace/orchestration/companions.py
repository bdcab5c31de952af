"""The models beside the policy: a critic that learns, and a reference and a teacher that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.config.methods import TeacherAdvantage
from millrace.config.settings import RunConfig
from millrace.data.tokenizers import load_tokenizer
from millrace.models.adapters import adapted_layers, merged
from millrace.models.heads import SCALAR, empty_scalar_model, scalar_model, scalar_weights
from millrace.models.load import Model
from millrace.models.mesh import Mesh
from millrace.orchestration.parts import SetupError
from millrace.orchestration.run_folder import model_folder
from millrace.training.loading import loaded, taken
from millrace.training.optimizer import adamw
from millrace.training.policy import BaseScorer
from millrace.training.scorer import ModelScorer
from millrace.training.spread import Spread
from millrace.training.value import ValueTrainer

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# Folder of the critic within a checkpoint.
CRITIC = "critic"


def critic(
    config: RunConfig,
    spread: Spread,
    mesh: Mesh | None,
    checkpoint: Path | None,
    *,
    device: torch.device,
    rate: Callable[[RunConfig, float], Callable[[int], float]],
) -> ValueTrainer:
    """The critic of a checkpoint, or a fresh one on the policy's present weights.

    Args:
        config: of the run.
        spread: the policy.
        mesh: over which the critic is spread too.
        checkpoint: that the run goes on from, if any.
        device: of this rank.
        rate: makes a learning rate by steps of the recipe and a peak.
    """
    assert config.critic is not None
    saved = None if checkpoint is None else checkpoint / CRITIC
    if saved is not None and saved.is_dir():
        own = loaded(saved, mesh, config.mesh, dtype=spread.model.dtype, device=device, kind=SCALAR)
    elif mesh is None:
        model = merged(spread.model) if adapted_layers(spread.model) else spread.model
        own = Spread(scalar_model(model))
    else:
        made = empty_scalar_model(spread.model)
        own = taken(made, scalar_weights(made, spread.named_tensors()), mesh, config.mesh, device)
    made = own.model
    options = config.policy.optimizer
    return ValueTrainer(
        made,
        adamw(
            made,
            betas=options.betas,
            weight_decay=options.weight_decay,
            eight_bit=options.eight_bit,
        ),
        learning_rate=rate(config, config.critic.learning_rate),
        clip=config.critic.clip,
        coefficient=config.critic.coefficient,
        max_tokens=config.policy.tokens_per_micro_batch,
        max_gradient_norm=options.max_gradient_norm,
        spread=own,
    )


def reference(
    config: RunConfig, policy: Spread, mesh: Mesh | None, device: torch.device, folder: Path
) -> ModelScorer:
    """What a KL penalty holds the policy to: the weights of a folder, or without a copy of it the base."""
    adapter = config.model.adapter
    if adapter is None or adapter.path is not None or config.warmup is not None:
        return _frozen(config, mesh, device, folder)
    # A fresh adapter adds nothing, so that the policy began as its base.
    limit = config.policy.tokens_per_micro_batch
    temperature = config.rollout.temperature
    return BaseScorer(policy.model, temperature=temperature, max_tokens=limit, spread=policy)


def _frozen(config: RunConfig, mesh: Mesh | None, device: torch.device, folder: Path) -> ModelScorer:
    """What the weights of a folder say of tokens; they never change."""
    dtype, limit = getattr(torch, config.precision), config.policy.tokens_per_micro_batch
    spread = loaded(folder, mesh, config.mesh, dtype=dtype, device=device, prepare=_still)
    temperature = config.rollout.temperature
    return ModelScorer(spread.model, temperature=temperature, max_tokens=limit, spread=spread)


def _still(model: Model) -> Model:
    """The model, of which nothing learns."""
    return model.requires_grad_(False)


def teacher(
    config: RunConfig, mesh: Mesh | None, device: torch.device, tokenizer: Tokenizer
) -> ModelScorer | None:
    """Whom on-policy distillation follows.

    Raises:
        SetupError: the teacher is not there, or reads other tokens than the policy.
    """
    if not isinstance(config.advantage, TeacherAdvantage):
        return None
    path = Path(config.advantage.path)
    if not path.is_dir():
        raise SetupError(
            f"teacher {path} does not exist; train one first (millrace train quickstart makes "
            "runs/quickstart-1) or set advantage.path to a run or a model folder"
        )
    folder = model_folder(path)
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise SetupError(
            f"teacher {folder} reads other tokens than the policy; distillation needs one tokenizer, so "
            "train both on the same data and tokenizer settings, or set tokenizer.path to the teacher's"
        )
    return _frozen(config, mesh, device, folder)
