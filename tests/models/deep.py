"""Models of four layers, to be cut into stages, batches that weigh their tokens, and a way to be refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from millrace.data.batch import Batch
from millrace.models.load import Model, fresh_config, fresh_model
from tests.models.copies import made_once
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, random_batch

NUM_LAYERS = 4


@made_once
def deep_model(architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    """As `tiny_model`, with four layers."""
    more: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    if architecture == "gemma3_text":
        more["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if architecture == "granite":
        more["embedding_multiplier"] = 3.0
    shape = {**SIZES, **SHAPES.get(architecture, {}), **more}
    if architecture == "gpt_neox":
        del shape["num_key_value_heads"]
    config = fresh_config(architecture, shape, vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 2 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


def weighted_batch(seed: int) -> Batch:
    batch = random_batch(seed)
    batch.weight_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) / 30
    return batch


def check_refused(kind: type[Exception], sentence: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(sentence)):
        call()
