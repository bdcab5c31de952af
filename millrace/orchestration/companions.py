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
from millrace.models.heads import load_scalar_model, scalar_model
from millrace.models.load import Model, fresh_model, load_model
from millrace.models.mesh import Mesh
from millrace.orchestration.parts import SetupError
from millrace.orchestration.run_folder import model_folder
from millrace.training.optimizer import adamw
from millrace.training.policy import BaseScorer
from millrace.training.scorer import ModelScorer
from millrace.training.spread import Spread, spread_over
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
    rate: Callable[[RunConfig, float], Callable[[int], float]],
) -> ValueTrainer:
    """The critic of a checkpoint, or a fresh one on the policy's present weights.

    Args:
        config: of the run.
        spread: the policy.
        mesh: over which the critic is spread too.
        checkpoint: that the run goes on from, if any.
        rate: makes a learning rate by steps of the recipe and a peak.
    """
    assert config.critic is not None
    model = spread.model
    saved = None if checkpoint is None else checkpoint / CRITIC
    if saved is not None and saved.is_dir():
        made = load_scalar_model(saved, dtype=model.dtype).to(model.device)
    else:
        made = scalar_model(_whole(spread))
    own = spread_over(made, mesh, config.mesh)
    options = config.policy.optimizer
    return ValueTrainer(
        made,
        adamw(made, betas=options.betas, weight_decay=options.weight_decay),
        learning_rate=rate(config, config.critic.learning_rate),
        clip=config.critic.clip,
        coefficient=config.critic.coefficient,
        max_tokens=config.policy.tokens_per_micro_batch,
        max_gradient_norm=options.max_gradient_norm,
        spread=own,
    )


def _whole(spread: Spread) -> Model:
    """The policy as one whole model, an adapter folded in; itself where it is that already."""
    if spread.alone:
        return merged(spread.model) if adapted_layers(spread.model) else spread.model
    model = fresh_model(spread.model.config, seed=0, dtype=spread.model.dtype).to(spread.model.device)
    with torch.no_grad():
        for name, tensor in spread.named_tensors():
            model.get_parameter(name).copy_(tensor)
    return model


def reference(config: RunConfig, model: Model, mesh: Mesh | None, folder: Path) -> ModelScorer:
    """What a KL penalty holds the policy to: the weights of a folder, or without a copy of it the base."""
    adapter = config.model.adapter
    if adapter is None or adapter.path is not None or config.warmup is not None:
        return _frozen(config, model, mesh, folder)
    # A fresh adapter adds nothing, so that the policy began as its base.
    limit = config.policy.tokens_per_micro_batch
    return BaseScorer(model, temperature=config.rollout.temperature, max_tokens=limit)


def _frozen(config: RunConfig, model: Model, mesh: Mesh | None, folder: Path) -> ModelScorer:
    """What the weights of a folder say of tokens; they never change."""
    frozen = load_model(folder, dtype=model.dtype).to(model.device).requires_grad_(False)
    limit = config.policy.tokens_per_micro_batch
    # A penalty over the whole vocabulary reads its head while the policy computes, so it is whole there.
    whole = config.policy.kl is not None and config.policy.kl.estimator == "full"
    spread = Spread(frozen, mesh=mesh) if whole else spread_over(frozen, mesh, config.mesh)
    return ModelScorer(frozen, temperature=config.rollout.temperature, max_tokens=limit, spread=spread)


def teacher(config: RunConfig, model: Model, mesh: Mesh | None, tokenizer: Tokenizer) -> ModelScorer | None:
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
    return _frozen(config, model, mesh, folder)
