"""Reward shaping, applied before advantages are estimated. N = trajectories."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(length_N: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """From 0 to -1 over the last `buffer` tokens: min(0, (max_tokens - buffer - length) / buffer), float64.

    Raises ValueError if `buffer` is not between 1 and `max_tokens`.
    Source: Yu et al. 2025, "DAPO" (soft overlong punishment).
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer is {buffer}; it must be between 1 and max_tokens ({max_tokens})")
    return torch.clamp((max_tokens - buffer - length_N.double()) / buffer, min=-1.0, max=0.0)
