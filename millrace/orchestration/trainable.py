"""Which weights of the policy learn: all, those that are not frozen, or an adapter beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config.inputs import ModelConfig
from millrace.models.adapters import (
    adapted_layers,
    add_adapter,
    freeze,
    load_adapter,
    merged,
    save_adapter,
    saved_base,
)
from millrace.models.load import Model, ModelError, Weights, save_model
from millrace.transport.fingerprint import fingerprint

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# Folder of the adapter within a saved model.
ADAPTER = "adapter"


def choose_weights(config: ModelConfig, model: Model, saved: Path | None, *, seed: int) -> str:
    """Freeze what is not to learn; where an adapter learns, put it beside the model.

    Args:
        config: says what learns.
        model: the policy; with an adapter, its base.
        saved: model folder of the checkpoint that is taken up, if any; its adapter goes on.
        seed: of a fresh adapter.

    Returns:
        a checksum of the base, for `save_policy`; empty where no adapter learns.

    Raises:
        ModelError: a pattern matches no weight, the adapter does not fit the model, or the base is not the
            one that the checkpoint's adapter was trained beside.
    """
    options = config.adapter
    if options is None:
        freeze(model, config.frozen)
        return ""
    each = sorted(fingerprint(model.named_parameters()).items())
    base = hashlib.sha256(repr(each).encode()).hexdigest()
    if saved is not None:
        if saved_base(saved / ADAPTER) != base:
            origin = f"model.path {config.path}" if config.path else "the fresh model of this seed"
            raise ModelError(
                f"adapter {saved / ADAPTER} was trained beside other weights than {origin} now holds; put "
                "those back, or start a new run from the checkpoint's model folder, where they are merged"
            )
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
    return base


def save_policy(model: Model, tokenizer: Tokenizer, base: str, folder: Path, weights: Weights | None) -> None:
    """Write a Hugging Face folder, tokenizer included: the model with its adapter merged, and the adapter.

    Args:
        model: the policy.
        tokenizer: of its tokens.
        base: what `choose_weights` gave.
        folder: it is made.
        weights: as `save_model` takes them.
    """
    if adapted_layers(model):
        save_model(merged(model), folder)
        save_adapter(model, folder / ADAPTER, base=base)
    else:
        save_model(model, folder, weights)
    tokenizer.save_pretrained(folder)
