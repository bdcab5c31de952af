"""Drawing tokens: temperature, top-k, top-p, and one uniform number per (seed, position).

B = rows, V = vocabulary. The random number is a function of the request's seed and the token's position
alone, so a token does not depend on the batch it sits in, on what was aborted, or on a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Rows:
    """The sampling parameters of a batch, one entry a row.

    Attributes:
        temperature_B: float32; 0 is greedy.
        top_k_B: int64; 0 is off.
        top_p_B: float32; 1 is off.
        seed_B: uint64.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    seed_B: np.ndarray

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Rows:
        """Columns from one SamplingParams a row."""
        return cls(
            torch.tensor([p.temperature for p in params], device=device),
            torch.tensor([p.top_k for p in params], device=device),
            torch.tensor([p.top_p for p in params], device=device),
            np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], dtype=np.uint64),
        )

    def take(self, index: Tensor) -> Rows:
        """The rows named by `index`."""
        seed_B = self.seed_B[index.cpu().numpy()]
        return Rows(self.temperature_B[index], self.top_k_B[index], self.top_p_B[index], seed_B)


def uniform(seed_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) for each (seed, position): two rounds of the SplitMix64 finaliser.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    with np.errstate(over="ignore"):
        mixed = _mix(
            _mix(seed_B.astype(np.uint64)) + position_B.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        )
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logit_BV: Tensor, rows: Rows, position_B: np.ndarray) -> tuple[Tensor, Tensor]:
    """One token per row.

    Args:
        logit_BV: float32 or float64 logits, temperature not yet applied.
        rows: parameters of each row.
        position_B: index of the token within its completion.

    Returns:
        tokens [B] and their log-probabilities [B] under softmax(logits / temperature), before top-k and
        top-p; for greedy rows under softmax(logits).
    """
    greedy_B = rows.temperature_B == 0
    scaled_BV = logit_BV / torch.where(greedy_B, 1.0, rows.temperature_B)[:, None]
    logprob_BV = scaled_BV.log_softmax(-1)
    share_BV = logprob_BV.double().exp()
    if bool((rows.top_k_B > 0).any() or (rows.top_p_B < 1).any()):
        share_BV = _truncated(share_BV, rows)
    mass_BV = share_BV.cumsum(-1)
    # The first token whose cumulative mass exceeds u * total; a token of no mass is never that one.
    threshold_B = torch.from_numpy(uniform(rows.seed_B, position_B)).to(mass_BV.device) * mass_BV[:, -1]
    token_B = torch.searchsorted(mass_BV, threshold_B[:, None], right=True)[:, 0].clamp(
        max=logit_BV.shape[1] - 1
    )
    token_B = torch.where(greedy_B, logit_BV.argmax(-1), token_B)
    return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]


def _truncated(share_BV: Tensor, rows: Rows) -> Tensor:
    """Probabilities with the tokens outside top-k and top-p set to 0; of equals, lower ids come first."""
    sorted_BV, order_BV = share_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(share_BV.shape[1], device=share_BV.device)
    limit_B = torch.where(rows.top_k_B > 0, rows.top_k_B, share_BV.shape[1])
    kept_BV = rank_V < limit_B[:, None]
    within_k_BV = sorted_BV * kept_BV
    before_BV = within_k_BV.cumsum(-1) - within_k_BV
    # top-p is taken of what top-k left, as vLLM and transformers do; the likeliest token always stays.
    reach_B = rows.top_p_B.double() * within_k_BV.sum(-1)
    kept_BV &= (before_BV < reach_B[:, None]) | (rows.top_p_B == 1)[:, None]
    kept_BV[:, 0] = True
    return torch.zeros_like(share_BV).scatter(1, order_BV, sorted_BV * kept_BV)
