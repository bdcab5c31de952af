"""Which tokens trainer and sampler both judge after a hand-over, and how alike they must be everywhere."""

from __future__ import annotations

import torch

from millrace.config.settings import RunConfig
from millrace.models.load import Model
from millrace.run.components import longest_sequence

NUM_TOKENS = 8
# Any tokens do; these lie apart in the vocabulary.
STRIDE = 7919
# Times the root of the dtype's last digit, 0.0014 in float32 and 0.35 in bfloat16: half of the digits, and
# two bits more for what kernels and layouts make of them. What is wrong by less shows in `mismatch/*`.
ROUNDINGS = 4.0


def canary(config: RunConfig, model: Model) -> tuple[tuple[int, ...], float]:
    """The tokens, and how far log-probabilities may lie apart in the mean.

    Args:
        config: of the run.
        model: what samples.
    """
    vocab_size = model.config.get_text_config().vocab_size
    count = min(NUM_TOKENS, longest_sequence(config, model))
    most = config.limits.canary or rounding(config)
    return tuple(n * STRIDE % vocab_size for n in range(1, count + 1)), most


def rounding(config: RunConfig, temperature: float = 1.0) -> float:
    """How far log-probabilities lie apart in the mean by the rounding of the recipe's dtypes, at the most.

    Args:
        config: of the run.
        temperature: of sampling; one below 1 enlarges what rounding made of the logits.
    """
    names = ("float32", config.precision, config.mesh.compute or "float32")
    digit = max(torch.finfo(getattr(torch, name)).eps for name in names)
    return float(ROUNDINGS * digit**0.5 / min(1.0, temperature))
