"""Which policy weights are trained, and the models beside it: critic, reference and teacher."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.config.inputs import ModelConfig
from millrace.config.mesh_section import MeshConfig
from millrace.config.method_sections import CriticConfig, TeacherAdvantage
from millrace.config.sections import EIGHT_BIT, PolicyConfig
from millrace.config.settings import RunConfig
from millrace.data.tokenizers import load_tokenizer
from millrace.distributed.mesh import Mesh
from millrace.errors import SetupError
from millrace.models.adapter_folder import load_adapter, save_adapter, saved_base
from millrace.models.adapters import adapted_layers, add_adapter, base_tensors, freeze, merged
from millrace.models.heads import SCALAR, empty_scalar_model, is_scalar, scalar_model, scalar_weights
from millrace.models.load import Model, ModelError, fresh_config, save_model
from millrace.models.saving import save_config
from millrace.run.folder import model_folder
from millrace.training.loading import loaded, taken
from millrace.training.optimizer import adamw
from millrace.training.parallel_model import ParallelModel, spread_over
from millrace.training.policy import BaseScorer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.transport.fingerprint import fingerprint

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


# Folder of the adapter within a saved model.
ADAPTER = "adapter"


def choose_weights(config: ModelConfig, model: Model, saved: Path | None, *, seed: int) -> None:
    """Freeze the weights that are not trained; add the adapter, if the recipe has one.

    Args:
        config: names the trainable weights or the adapter.
        model: the policy, with weights or on the meta device; with an adapter, its base.
        saved: model folder of the checkpoint to resume, if any; its adapter is loaded.
        seed: of a fresh adapter.

    Raises:
        ModelError: a pattern matches no weight, the adapter does not fit the model, or the checkpoint is of
            another architecture.
    """
    if saved is not None:
        _check_architecture(config, model, saved)
    options = config.adapter
    if options is None:
        freeze(model, config.frozen)
    elif saved is not None:
        load_adapter(model, saved / ADAPTER)
    elif options.path is not None:
        load_adapter(model, options.path)
    else:
        add_adapter(
            model,
            rank=options.rank,
            alpha=options.alpha,
            seed=seed,
            targets=options.targets,
            rank_stabilised=options.rank_stabilised,
        )


def check_base(config: ModelConfig, model: Model, saved: Path | None) -> str:
    """Return a checksum of the base weights of an adapter; empty without an adapter.

    A collective call: all ranks make it in the same order, once the model is sharded and has its weights.

    Args:
        config: where the base is from.
        model: the policy.
        saved: model folder of the checkpoint to resume, if any.

    Raises:
        ModelError: the checkpoint's adapter was trained on another base.
    """
    if not adapted_layers(model):
        return ""
    each = sorted(fingerprint(base_tensors(model)).items())
    base = hashlib.sha256(repr(each).encode()).hexdigest()
    if saved is not None and saved_base(saved / ADAPTER) != base:
        origin = f"model.path {config.path}" if config.path else "the fresh model of this seed"
        raise ModelError(
            f"adapter {saved / ADAPTER} was trained beside other weights than {origin} now holds; put "
            "those back, or start a new run from the checkpoint's model folder, where they are merged"
        )
    return base


def _check_architecture(config: ModelConfig, model: Model, saved: Path) -> None:
    """Refuse a checkpoint whose architecture differs from a fresh model of this recipe."""
    if config.path is not None:
        return
    held = model.config
    text = held.get_text_config()
    wanted = fresh_config(
        config.architecture, config.shape, vocab_size=text.vocab_size, eos_token_id=held.eos_token_id
    )
    for name in ("model_type", *config.shape):
        if getattr(held, name, None) != getattr(wanted, name):
            raise ModelError(
                f"checkpoint model {saved} has {name} {getattr(held, name, None)} and the recipe makes it "
                f"{getattr(wanted, name)}; put the recipe's model section back, or start a new run from the "
                "folder with model.path"
            )


def save_policy(model: Model, tokenizer: Tokenizer, base: str, folder: Path, *, weights: bool = True) -> None:
    """Write a Hugging Face folder, tokenizer included: the model with its adapter merged, and the adapter.

    Args:
        model: the policy.
        tokenizer: of the policy.
        base: checksum from `check_base`.
        folder: to create.
        weights: whether to write the weights too; they must be whole on this rank.
    """
    adapted = bool(adapted_layers(model))
    if weights:
        save_model(merged(model) if adapted else model, folder)
    else:
        save_config(model, folder)
    if adapted:
        save_adapter(model, folder / ADAPTER, base=base, weights=weights)
    tokenizer.save_pretrained(folder)


# Folder of the critic within a checkpoint.
CRITIC = "critic"


def critic(
    critic_config: CriticConfig,
    policy_config: PolicyConfig,
    spread: ParallelModel,
    mesh: Mesh | None,
    checkpoint: Path | None,
    *,
    mesh_config: MeshConfig,
    device: torch.device,
    rate: Callable[[int], float],
    start: Path | None,
) -> ValueTrainer:
    """Load the critic of a checkpoint, or build a fresh one on a folder's or the policy's current weights.

    Args:
        critic_config: of the recipe.
        policy_config: of the recipe; the critic has its optimizer.
        spread: the policy.
        mesh: of the policy; the critic is sharded over it too.
        checkpoint: to resume from, if any.
        mesh_config: of the recipe.
        device: of this rank.
        rate: learning rate of each optimizer step.
        start: folder of a fresh critic's weights; None for the policy's.
    """
    read = partial(loaded, mesh=mesh, options=mesh_config, dtype=spread.model.dtype, device=device)
    saved = None if checkpoint is None else checkpoint / CRITIC
    if saved is not None and saved.is_dir():
        own = read(saved, kind=SCALAR)
    elif start is not None and is_scalar(start):
        own = read(start, kind=SCALAR)
    else:
        source = spread if start is None else read(start)
        if mesh is None:
            model = merged(source.model) if adapted_layers(source.model) else source.model
            own = spread_over(scalar_model(model), mesh, mesh_config)
        else:
            made = empty_scalar_model(source.model)
            own = taken(made, scalar_weights(made, source.named_tensors()), mesh, mesh_config, device)
    made = own.model
    options = policy_config.optimizer
    return ValueTrainer(
        made,
        adamw(
            made,
            betas=options.betas,
            weight_decay=options.weight_decay,
            eight_bit=options.kind == EIGHT_BIT,
        ),
        learning_rate=rate,
        clip=critic_config.clip,
        coefficient=critic_config.coefficient,
        max_tokens=policy_config.tokens_per_micro_batch,
        max_grad_norm=options.max_grad_norm,
        spread=own,
    )


def reference(
    config: RunConfig,
    policy: ParallelModel,
    mesh: Mesh | None,
    device: torch.device,
    own: Path | None,
    folder: Path,
) -> ModelScorer:
    """Build the reference policy: a frozen copy from a folder, or the policy with its adapter off.

    Args:
        config: of the run.
        policy: to train.
        mesh: of the policy; the reference is sharded over it too.
        device: of this rank.
        own: folder of `policy.kl.path`, if there is one.
        folder: of the weights that reinforcement starts from.
    """
    adapter = config.model.adapter
    if own is not None or adapter is None or adapter.path is not None or config.sft is not None:
        return _frozen(config, mesh, device, own or folder)
    # A fresh adapter is zero, so the initial policy equals its base.
    limit = config.policy.tokens_per_micro_batch
    temperature = config.rollout.temperature
    return BaseScorer(policy.model, temperature=temperature, max_tokens=limit, spread=policy)


def _frozen(config: RunConfig, mesh: Mesh | None, device: torch.device, folder: Path) -> ModelScorer:
    """Load a frozen scorer of tokens from a folder."""
    dtype, limit = getattr(torch, config.precision), config.policy.tokens_per_micro_batch
    spread = loaded(folder, mesh, config.mesh, dtype=dtype, device=device, prepare=_still)
    temperature = config.rollout.temperature
    return ModelScorer(spread.model, temperature=temperature, max_tokens=limit, spread=spread)


def _still(model: Model) -> Model:
    """Freeze all weights of the model."""
    return model.requires_grad_(False)


def teacher(
    config: RunConfig, mesh: Mesh | None, device: torch.device, tokenizer: Tokenizer
) -> ModelScorer | None:
    """Load the teacher of on-policy distillation.

    Raises:
        SetupError: the teacher does not exist, or has another vocabulary than the policy.
    """
    if not isinstance(config.advantage, TeacherAdvantage):
        return None
    return _frozen(config, mesh, device, other_model("advantage.path", config.advantage.path, tokenizer))


def other_model(key: str, given: str, tokenizer: Tokenizer) -> Path:
    """Return the folder of a model that reads the policy's tokens.

    Args:
        key: of the setting, for messages.
        given: a model folder, a checkpoint or a run.
        tokenizer: of the policy.

    Raises:
        SetupError: there is no such folder, or its tokenizer has another vocabulary.
        CheckpointError: the run has no complete checkpoint.
    """
    if not Path(given).is_dir():
        raise SetupError(
            f"{key} {given} does not exist; give a model folder, a checkpoint or a run (millrace train "
            "quickstart makes runs/quickstart-1)"
        )
    folder = model_folder(Path(given))
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise SetupError(
            f"{key} {given} reads other tokens than the policy; give a model with the policy's tokenizer, or "
            "set tokenizer.path to that of the other model"
        )
    return folder


def critic_start(given: str, tokenizer: Tokenizer) -> Path:
    """Return the folder that a critic starts from: of a checkpoint or run its critic, if it has one.

    Raises:
        SetupError: as `other_model`.
        CheckpointError: the run has no complete checkpoint.
    """
    folder = other_model("critic.path", given, tokenizer)
    beside = folder.parent / CRITIC
    return beside if folder != Path(given) and beside.is_dir() else folder
