"""What a decode step does between its products, in one pass each: with few rows calls cost more than numbers.

T = tokens, H = query heads, J = key heads, K = head width, F = width of a feed-forward. float32 on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.kernels.compiled import array, compiled
from millrace.kernels.paged_attention_cpu import exponential

NO_GAIN = torch.empty(0)


def norm_rotate(
    qkv_TN: Tensor,
    cos_TK: Tensor,
    sin_TK: Tensor,
    *,
    num_heads: int,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries and keys of a joint product: each head by its root mean square, then turned to its position.

    Args:
        qkv_TN: queries, keys and values side by side, float32 [T, (H + 2 J) K].
        cos_TK: cosines of the positions, as transformers makes them (both halves of K alike).
        sin_TK: sines likewise.
        num_heads: H.
        gains: factors [K] of queries and of keys after the norm; None for models without these norms.
        eps: of the norms.

    Returns:
        queries [T, H, K] and keys [T, J, K], float32.
    """
    num_tokens, width = cos_TK.shape
    num_keys = (qkv_TN.shape[1] // width - num_heads) // 2
    turned_TNK = torch.empty(num_tokens, num_heads + num_keys, width)
    query_gain_K, key_gain_K = gains or (NO_GAIN, NO_GAIN)
    _norm_rotate(
        array(qkv_TN),
        (array(cos_TK.float()), array(sin_TK.float())),
        (array(query_gain_K), array(key_gain_K)),
        np.float32(eps),
        num_heads,
        turned_TNK.numpy(),
    )
    return turned_TNK[:, :num_heads], turned_TNK[:, num_heads:]


def gated(both_TN: Tensor) -> Tensor:
    """silu(gate) * up of [gate, up] side by side, float32 [T, 2 F] to [T, F]; silu x = x / (1 + e^-x)."""
    out_TF = torch.empty(len(both_TN), both_TN.shape[1] // 2)
    _gated(array(both_TN), out_TF.numpy())
    return out_TF


@compiled("contract", "reassoc")
def _norm_rotate(qkv_TN: Any, angles: Any, gains: Any, eps: Any, num_heads: int, turned_TNK: Any) -> None:
    cos_TK, sin_TK = angles
    query_gain_K, key_gain_K = gains
    num_tokens, num_turned, width = turned_TNK.shape
    half = width // 2
    x_K = np.empty(width, np.float32)
    for t in range(num_tokens):
        for n in range(num_turned):
            for k in range(width):
                x_K[k] = qkv_TN[t, n * width + k]
            gain_K = query_gain_K if n < num_heads else key_gain_K
            if len(gain_K):
                square = np.float32(0)
                for k in range(width):
                    square += x_K[k] * x_K[k]
                scale = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
                for k in range(width):
                    x_K[k] *= scale * gain_K[k]
            for k in range(half):
                turned_TNK[t, n, k] = x_K[k] * cos_TK[t, k] - x_K[half + k] * sin_TK[t, k]
                turned_TNK[t, n, half + k] = x_K[half + k] * cos_TK[t, k] + x_K[k] * sin_TK[t, k]


@compiled("contract")
def _gated(both_TN: Any, out_TF: Any) -> None:
    width = out_TF.shape[1]
    for t in range(len(out_TF)):
        # Rows by themselves: only then does the compiler see that they do not overlap, and uses vectors.
        gate_F, up_F, out_F = both_TN[t, :width], both_TN[t, width:], out_TF[t]
        for f in range(width):
            gate = np.float64(gate_F[f])
            # Of the two exponentials the one that cannot overflow.
            power = exponential(-abs(gate))
            out_F[f] = (gate if gate > 0 else gate * power) / (1.0 + power) * up_F[f]
