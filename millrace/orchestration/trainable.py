"""Which weights of the policy learn: all, those that are not frozen, or an adapter beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config.inputs import ModelConfig
from millrace.models.adapter_folder import load_adapter, save_adapter, saved_base
from millrace.models.adapters import adapted_layers, add_adapter, base_tensors, freeze, merged
from millrace.models.load import Model, ModelError, fresh_config, save_model
from millrace.models.saving import save_config
from millrace.transport.fingerprint import fingerprint

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# Folder of the adapter within a saved model.
ADAPTER = "adapter"


def choose_weights(config: ModelConfig, model: Model, saved: Path | None, *, seed: int) -> None:
    """Freeze what is not to learn; where an adapter learns, put it beside the model.

    Args:
        config: says what learns.
        model: the policy, whole or without memory; with an adapter, its base.
        saved: model folder of the checkpoint that is taken up, if any; its adapter goes on.
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
    """A checksum of the weights that an adapter stands beside; empty where there is none.

    All ranks call it in step, once the model is dealt and has its weights.

    Args:
        config: where the base is from.
        model: the policy.
        saved: model folder of the checkpoint that is taken up, if any.

    Raises:
        ModelError: the checkpoint's adapter was trained beside another base.
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
    """Refuse a checkpoint that a fresh model of this recipe could not have become."""
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
        tokenizer: of its tokens.
        base: what `check_base` gave.
        folder: it is made.
        weights: whether the merged model's and the adapter's are written too; they must be whole on this
            rank.
    """
    adapted = bool(adapted_layers(model))
    if weights:
        save_model(merged(model) if adapted else model, folder)
    else:
        save_config(model, folder)
    if adapted:
        save_adapter(model, folder / ADAPTER, base=base, weights=weights)
    tokenizer.save_pretrained(folder)
