"""Canary tokens: trainer and sampler compare their log-probabilities after each weight update."""

from __future__ import annotations

import torch

from millrace.config.settings import RunConfig
from millrace.models.load import Model
from millrace.run.components import longest_sequence

NUM_TOKENS = 8
# Any tokens do; these are spread over the vocabulary.
STRIDE = 7919
# Factor on the square root of the dtype's epsilon, 0.0014 in float32 and 0.35 in bfloat16: half of the
# digits, plus two bits for differences between kernels and layouts. Smaller errors show in `mismatch/*`.
ROUNDINGS = 4.0


def canary(config: RunConfig, model: Model) -> tuple[tuple[int, ...], float]:
    """Return the canary tokens and the largest allowed mean difference of their log-probabilities.

    Args:
        config: of the run.
        model: of the sampler.
    """
    vocab_size = model.config.get_text_config().vocab_size
    count = min(NUM_TOKENS, longest_sequence(config, model))
    most = config.limits.canary or rounding(config)
    return tuple(n * STRIDE % vocab_size for n in range(1, count + 1)), most


def rounding(config: RunConfig, temperature: float = 1.0) -> float:
    """Return the largest mean difference of log-probabilities that rounding in the recipe's dtypes explains.

    Args:
        config: of the run.
        temperature: of sampling; below 1 it enlarges rounding errors of the logits.
    """
    names = ("float32", config.precision, config.mesh.compute_dtype or "float32")
    digit = max(torch.finfo(getattr(torch, name)).eps for name in names)
    return float(ROUNDINGS * digit**0.5 / min(1.0, temperature))
