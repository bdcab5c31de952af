"""Token sampling and log-probabilities from logits: the arithmetic, and references for compiled kernels.

N = rows, V = vocabulary, C = tiles of a row, K = TILE tokens of a tile.

With z = logits / temperature and m = max z, token v has the mass exp(z_v - m). Masses are summed pairwise
(first half plus second half), first within each tile (in the dtype of the logits), then over the tiles (in
float64). The order depends on V alone, so that a row gives the same bits in any batch. Every number of a row
is computed by sums, products, one division and one logarithm, without fused operations; therefore the
compiled kernels and the plain implementations give the same bits. On a CPU the exponential is implemented
here for that reason; elsewhere it is torch's own.

A row with NaN or plus infinity, or with nothing above minus infinity, has no distribution: its
log-probability is NaN and its token is an arbitrary token of the vocabulary.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TILE = 256
# exp(x) = 2^k exp(r) with k = round(x / ln 2) and |r| <= ln(2) / 2. ln 2 is split in two; k times the first
# part has no rounding error.
LN2_HIGH = 355 / 512
LN2_LOW = -2.1219444005469058277e-4


class Numbers(NamedTuple):
    """Constants of the exponential in one dtype; scalars of that dtype and of its integer type.

    At and below `least` the exponential counts as 0; 2^k would not be a normal number. Adding `rounder`
    rounds to an integer, held in the lowest bits of the sum. `ln2_high` and `ln2_low` add up to ln 2.
    `series` is 1 / n! from the highest power to n = 0. `bias` is of the exponent, `shift` the bits of the
    mantissa.
    """

    zero: np.floating
    least: np.floating
    per_ln2: np.floating
    rounder: np.floating
    ln2_high: np.floating
    ln2_low: np.floating
    series: tuple[np.floating, ...]
    bias: np.signedinteger
    shift: np.signedinteger


@cache
def numbers(dtype: torch.dtype) -> Numbers:
    """Return the constants of the exponential in float32 or float64."""
    is_double = dtype == torch.float64
    real, whole = (np.float64, np.int64) if is_double else (np.float32, np.int32)
    about = np.finfo(real)
    # The first omitted power is smaller than the rounding error: (ln(2) / 2)^8 / 8! is 5e-9.
    powers = range(13 if is_double else 7, -1, -1)
    return Numbers(
        zero=real(0),
        least=real(math.log(about.tiny)),
        per_ln2=real(1 / math.log(2)),
        rounder=real(1.5 * 2.0**about.nmant),
        ln2_high=real(LN2_HIGH),
        ln2_low=real(LN2_LOW),
        series=tuple(real(1 / math.factorial(power)) for power in powers),
        bias=whole(about.maxexp - 1),
        shift=whole(about.nmant),
    )


def heat(logit_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Return the divisor of the logits, in their dtype: the temperature, or 1 where it is 0 (greedy)."""
    return temperature_N.to(logit_NV.dtype).masked_fill(temperature_N == 0, 1)


def sample_plain(logit_NV: Tensor, temperature_N: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Reference for `sample`."""
    z_NV, peak_N = _z(logit_NV, temperature_N)
    mass_NCK = _tiles(_masses(z_NV, peak_N))
    reached_NC = _halved(mass_NCK).double().cumsum(1)
    threshold_N = uniform_N.double() * reached_NC[:, -1]
    tile_N = _first(reached_NC > threshold_N[:, None])
    row_N = torch.arange(len(z_NV), device=z_NV.device)
    left_N = threshold_N - torch.where(tile_N > 0, reached_NC[row_N, tile_N - 1], 0)
    mass_NK = mass_NCK[row_N, tile_N]
    passed_NK = mass_NK.double().cumsum(1) > left_N[:, None]
    # Sequential sums may be slightly less than pairwise sums; then the last token with mass is chosen.
    last_N = TILE - 1 - _first((mass_NK > 0).flip(1))
    token_N = tile_N * TILE + torch.where(passed_NK.any(1), _first(passed_NK), last_N)
    token_N = torch.where(temperature_N == 0, logit_NV.argmax(1), token_N).clamp(max=z_NV.shape[1] - 1)
    return token_N, _logprob(z_NV, peak_N, mass_NCK, token_N)


def row_logprob_plain(logit_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    """Reference for `row_logprob`."""
    z_NV, peak_N = _z(logit_NV, temperature_N)
    return _logprob(z_NV, peak_N, _tiles(_masses(z_NV, peak_N)), target_N.long())


def truncate_plain(
    logit_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> None:
    """Reference for `truncate`; it sorts."""
    sorted_NV, order_NV = logit_NV.sort(dim=1, descending=True, stable=True)
    share_NV = _masses(*_z(sorted_NV, temperature_N)).double()
    kept_NV = share_NV >= min_p_N[:, None]
    kept_NV &= (kept_NV.cumsum(1) <= top_k_N[:, None]) | (top_k_N == 0)[:, None]
    share_NV = share_NV * kept_NV
    before_NV = share_NV.cumsum(1) - share_NV
    kept_NV &= (before_NV < (top_p_N * share_NV.sum(1))[:, None]) | (top_p_N == 1)[:, None]
    logit_NV.scatter_(1, order_NV, sorted_NV.masked_fill(~kept_NV, -math.inf))


def _z(logit_NV: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    z_NV = logit_NV / heat(logit_NV, temperature_N)[:, None]
    return z_NV, z_NV.amax(1)


def _masses(z_NV: Tensor, peak_N: Tensor) -> Tensor:
    x_NV = z_NV - peak_N[:, None]
    return _exp(x_NV) if x_NV.device.type == "cpu" else x_NV.exp()


def _exp(x_NV: Tensor) -> Tensor:
    """exp(x) of x <= 0, within 3 units in the last place; NaN stays NaN."""
    n = numbers(x_NV.dtype)
    x_NV = x_NV.clamp(min=float(n.least))
    rounded_NV = x_NV * float(n.per_ln2) + float(n.rounder)
    power_NV = rounded_NV - float(n.rounder)
    rest_NV = x_NV - power_NV * float(n.ln2_high) - power_NV * float(n.ln2_low)
    sum_NV = torch.full_like(x_NV, float(n.series[0]))
    for factor in n.series[1:]:
        sum_NV = sum_NV * rest_NV + float(factor)
    whole_NV = rounded_NV.view(torch.int64 if x_NV.dtype == torch.float64 else torch.int32)
    scale_NV = ((whole_NV + int(n.bias)) << int(n.shift)).view(x_NV.dtype)
    return (sum_NV * scale_NV).masked_fill(x_NV <= float(n.least), 0)


def _tiles(mass_NV: Tensor) -> Tensor:
    return torch.nn.functional.pad(mass_NV, (0, -mass_NV.shape[1] % TILE)).unflatten(1, (-1, TILE))


def _halved(x: Tensor) -> Tensor:
    """Pairwise sum over the last axis, of a power-of-two length: add the second half to the first, repeat."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _first(true_NC: Tensor) -> Tensor:
    return true_NC.byte().argmax(1)


def _logprob(z_NV: Tensor, peak_N: Tensor, mass_NCK: Tensor, token_N: Tensor) -> Tensor:
    sum_NC = _halved(mass_NCK).double()
    num_tiles = sum_NC.shape[1]
    total_N = _halved(torch.nn.functional.pad(sum_NC, (0, _power_of_two(num_tiles) - num_tiles)))
    if total_N.device.type == "cpu":
        # torch's own logarithm differs from the C library's in the last bit.
        log_N = total_N.new_tensor([math.log(total) for total in total_N.tolist()])
    else:
        log_N = total_N.log()
    distance_N = z_NV.gather(1, token_N[:, None])[:, 0] - peak_N
    return (distance_N.double() - log_N).to(z_NV.dtype)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
