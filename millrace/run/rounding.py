"""Canary tokens: trainer and sampler compare their log-probabilities after each weight update."""

from __future__ import annotations

import torch

from millrace.models.load import Model

NUM_TOKENS = 8
# Any tokens do; these are spread over the vocabulary.
STRIDE = 7919
# Factor on the square root of the dtype's epsilon, 0.0014 in float32 and 0.35 in bfloat16: half of the
# digits, plus two bits for differences between kernels and layouts. Smaller errors show in `mismatch/*`.
ROUNDINGS = 4.0


def canary_tokens(model: Model, *, longest: int) -> tuple[int, ...]:
    """Return the canary tokens.

    Args:
        model: of the sampler.
        longest: tokens of the longest sequence.
    """
    vocab_size = model.config.get_text_config().vocab_size
    return tuple(n * STRIDE % vocab_size for n in range(1, min(NUM_TOKENS, longest) + 1))


def rounding(precision: str, compute_dtype: str | None, temperature: float = 1.0) -> float:
    """Return the largest mean difference of log-probabilities that rounding in the recipe's dtypes explains.

    Args:
        precision: dtype of the weights.
        compute_dtype: of the matrix products; None for that of the weights.
        temperature: of sampling; below 1 it enlarges rounding errors of the logits.
    """
    names = ("float32", precision, compute_dtype or "float32")
    digit = max(torch.finfo(getattr(torch, name)).eps for name in names)
    return float(ROUNDINGS * digit**0.5 / min(1.0, temperature))
