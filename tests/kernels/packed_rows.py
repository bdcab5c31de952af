"""Random packed rows, and GAE straight from its definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Two rows for a scan, and what GAE takes. Some segments are empty, some lambdas are 0 and 1."""

    x_T: Tensor
    w_T: Tensor
    reward_T: Tensor
    value_T: Tensor
    length_B: Tensor
    lam_B: Tensor
    bootstrap_B: Tensor

    def scan(self) -> tuple[Tensor, Tensor]:
        return self.x_T, self.w_T

    def gae(self) -> dict[str, Any]:
        return {
            "reward_T": self.reward_T,
            "value_T": self.value_T,
            "length_B": self.length_B,
            "lam": self.lam_B,
            "bootstrap_B": self.bootstrap_B,
        }


def random_rows(
    seed: int, dtype: torch.dtype, *, lengths: list[int] | None = None, longest: int = 40
) -> Rows:
    """Rows of nine segments, or of the given lengths; float64 numbers rounded to the dtype."""
    draw = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, longest + 1, (9,), generator=draw)
    length_B[torch.randint(0, 9, (2,), generator=draw)] = 0
    if lengths is not None:
        length_B = torch.tensor(lengths, dtype=torch.int64)
    num_segments, num_tokens = len(length_B), int(length_B.sum())

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64).to(dtype)

    def share(size: int) -> Tensor:
        wide = 1.3 * torch.rand(size, generator=draw, dtype=torch.float64) - 0.2
        return wide.clamp(0, 1)

    return Rows(
        x_T=normal(num_tokens),
        w_T=share(num_tokens).to(dtype),
        reward_T=normal(num_tokens),
        value_T=normal(num_tokens),
        length_B=length_B,
        lam_B=share(num_segments),
        bootstrap_B=normal(num_segments),
    )


def gae_by_sums(rows: Rows, gamma: float) -> tuple[Tensor, Tensor]:
    """A_t = sum over k of (gamma lambda)^k delta_{t+k} in its segment, and A_t + V_t; float64."""
    advantages, values = [], rows.value_T.double()
    for b, (reward, value) in enumerate(
        zip(
            rows.reward_T.split(rows.length_B.tolist()),
            rows.value_T.split(rows.length_B.tolist()),
            strict=True,
        )
    ):
        r, v = reward.tolist(), [*value.tolist(), float(rows.bootstrap_B[b])]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        decay = gamma * float(rows.lam_B[b])
        advantages += [
            sum(decay ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))
        ]
    advantage_T = torch.tensor(advantages, dtype=torch.float64)
    return advantage_T, advantage_T + values
