"""ALiBi: a score's bias by position, as further columns of queries and keys.

ALiBi adds slope_h * (key position - query position) to a score after its factor. With the columns

    query  -b1 -b2  a1 a1 a1  a2 a2 a2        a = slope_h / factor,  b = a * query position
    key      1   1  k2 k1 k0  k2 k1 k0        key position = k2 + k1 + k0, the bits above 2^16, 2^8 and 1

a kernel that knows nothing of it computes the same scores, and a key's columns depend on its position alone:
it is cached, shared and read by any later query. a1 and b1 are a and b in bfloat16, a2 and b2 the rest. So in
bfloat16 every column of a key is exact up to position 2^24, and a slope is off by at most 2^-16 of itself.
In float32 all is exact to rounding.

The columns come first: a kernel that sums in their order has subtracted the query's position before it adds
the products of the heads, so a bias of thousands costs no precision near the query, where attention is. An
error of b shifts all scores of a query alike, which softmax ignores.

T = tokens, H = query heads, J = key heads, K = head width, C = `COLUMNS`.

Source: Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# As many as fused kernels on a GPU need a width to be a multiple of.
COLUMNS = 8

Columns = tuple[Tensor, Tensor]
Heads = tuple[Tensor, Tensor, Tensor]


def linear_columns(position_T: Tensor, slope_H: Tensor, *, scale: float, dtype: torch.dtype) -> Columns:
    """Make the columns of queries [H, T, C] and keys [1, T, C] that add slope_h * distance to a score.

    `scale` is the factor of the scores; slopes are float32 or wider.
    """
    wide = torch.promote_types(dtype, torch.float32)
    a_H1 = slope_H.to(wide)[:, None] / scale
    b_HT = a_H1 * position_T.to(wide)
    a1_HT, a2_HT = (x_H1.expand_as(b_HT) for x_H1 in _halves(a_H1))
    b1_HT, b2_HT = _halves(b_HT)
    query_HTC = torch.stack([-b1_HT, -b2_HT, *[a1_HT] * 3, *[a2_HT] * 3], -1)
    digits = [position_T & ~0xFFFF, position_T & 0xFF00, position_T & 0xFF]
    one_T = torch.ones_like(position_T)
    key_1TC = torch.stack([one_T, one_T, *digits, *digits], -1)[None]
    return query_HTC.to(dtype), key_1TC.to(dtype)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split numbers into their bfloat16 and the rest, both in the given dtype."""
    high = x.bfloat16().to(x.dtype)
    return high, x - high


def rounded_columns(bias_HT: Tensor, *, dtype: torch.dtype) -> Columns:
    """Make columns [H, T, C] that add bias_h(key) - bias_h(query) to a score before its factor.

    The bias is in bfloat16, as each token's own position has it, so that no column is rounded.
    """
    bias_HT = bias_HT.to(dtype)
    one_HT = torch.ones_like(bias_HT)
    query_HTC, key_HTC = torch.stack([-bias_HT, one_HT], -1), torch.stack([one_HT, bias_HT], -1)
    return F.pad(query_HTC, (0, COLUMNS - 2)), F.pad(key_HTC, (0, COLUMNS - 2))


def with_columns(heads: Heads, columns: Columns) -> Heads:
    """Put columns before queries [1, H, T, K] and keys [1, J, T, K], and as many zeros behind values.

    Kernels are fastest where values are as wide as keys. Keys and values are repeated if each key head needs
    several biases.
    """
    query, key, value = heads
    query_HTC, key_JTC = columns
    num_heads = max(key.shape[1], len(key_JTC))
    key, value = (x.expand(-1, num_heads, -1, -1) for x in (key, value))
    key_columns = key_JTC[None].expand(-1, num_heads, -1, -1)
    return (
        torch.cat([query_HTC[None], query], -1),
        torch.cat([key_columns, key], -1),
        F.pad(value, (0, COLUMNS)),
    )
