"""Sampling compiled for the CPU: tile by tile, without a temporary of the size of the logits.

N = rows, V = vocabulary; the arithmetic is that of `sampling_plain`, bit for bit. Array names inside the
kernels have no shape suffix. Rows are distributed over threads if there are enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.kernels.compiled import compiled
from millrace.kernels.sampling_plain import TILE, heat, numbers
from millrace.kernels.team import bounds, cuts, share_out

# Least logits per thread.
PART_LOGITS = 1 << 14
# Number of running maxima, so that one instruction compares many logits.
LANES = 64
# Truncation counts tokens in buckets of z of width 1/32, from the greatest down; the last takes the rest.
BUCKETS_PER_NAT = 32
LAST_BUCKET = 1023

Array = NDArray[Any]
Arrays = tuple[Array, ...]
Tile = tuple[Array, Array, Array]
# (zero, least, per_ln2, rounder, ln2_high, ln2_low), series, (bias, shift) of `sampling_plain.Numbers`. Plain
# tuples: machine code cached on disk for a class could not be loaded after the class has moved.
Numbers = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, Any]]


def sample(logit_NV: Tensor, temperature_N: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """See `sampling.sample`; the logits are contiguous, u is float64."""
    token_N, logprob_N = torch.empty(len(logit_NV), dtype=torch.int64), logit_NV.new_empty(len(logit_NV))
    heat_N = heat(logit_NV, temperature_N)
    _over_rows(_sample_all, logit_NV, temperature_N == 0, heat_N, uniform_N, token_N, logprob_N)
    return token_N, logprob_N


def row_logprob(logit_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    """See `sampling.row_logprob`; the logits are contiguous, targets are int64 and within the vocabulary."""
    logprob_N = logit_NV.new_empty(len(logit_NV))
    _over_rows(_row_logprob_all, logit_NV, target_N, heat(logit_NV, temperature_N), logprob_N)
    return logprob_N


def truncate(
    logit_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> None:
    """See `sampling.truncate`; the logits are contiguous, top-k is int64, top-p and min-p are float64."""
    _over_rows(_truncate_all, logit_NV, heat(logit_NV, temperature_N), top_k_N, top_p_N, min_p_N)


def _over_rows(kernel: Callable[..., None], logit_NV: Tensor, *columns: Tensor) -> None:
    num_rows = len(logit_NV)
    arrays = logit_NV.numpy(), tuple(column_N.numpy() for column_N in columns)
    n = numbers(logit_NV.dtype)
    reals = n.zero, n.least, n.per_ln2, n.rounder, n.ln2_high, n.ln2_low
    num_parts, num_members = cuts(min(num_rows, logit_NV.numel() // PART_LOGITS))
    kernel((reals, n.series, (n.bias, n.shift)), *arrays, num_parts, num_members)


@compiled()
def _sample(n: Numbers, logit: Array, columns: tuple[Array, ...], num_parts: int, part: int) -> None:
    greedy, heat, uniform, token, logprob = columns
    tile, sums = _buffers(n, logit)
    start, stop = bounds(len(logit), num_parts, part)
    for row in range(start, stop):
        x = logit[row]
        greatest = _greatest(x)
        scale = heat[row], greatest / heat[row]
        _add_up(n, x, scale, tile, sums)
        v = _first_equal(x, greatest) if greedy[row] else _chosen(n, x, scale, (tile, sums), uniform[row])
        token[row] = v
        logprob[row] = _logprob(x[v], scale, sums)


@compiled()
def _row_logprob(n: Numbers, logit: Array, columns: tuple[Array, ...], num_parts: int, part: int) -> None:
    target, heat, logprob = columns
    tile, sums = _buffers(n, logit)
    start, stop = bounds(len(logit), num_parts, part)
    for row in range(start, stop):
        x = logit[row]
        scale = heat[row], _greatest(x) / heat[row]
        _add_up(n, x, scale, tile, sums)
        logprob[row] = _logprob(x[target[row]], scale, sums)


@compiled()
def _buffers(n: Numbers, logit: Array) -> tuple[Tile, Array]:
    """Allocate tiles (masses, rounded powers, their bits) and zeros; omitted zeros would not change a sum."""
    width, num_sums = 1, 1
    while width < min(logit.shape[1], TILE):
        width *= 2
    while num_sums * TILE < logit.shape[1]:
        num_sums *= 2
    bias, _ = n[2]
    tile = np.empty(width, logit.dtype), np.empty(width, logit.dtype), np.full(width, bias)
    return tile, np.zeros(num_sums)


@compiled()
def _greatest(x: Array) -> Any:
    lanes = np.full(LANES, -np.inf, x.dtype)
    in_lanes = len(x) // LANES * LANES
    for first in range(0, in_lanes, LANES):
        y = x[first : first + LANES]
        for k in range(LANES):
            lanes[k] = max(lanes[k], y[k])
    greatest = x[0]
    for k in range(LANES):
        greatest = max(greatest, lanes[k])
    for v in range(in_lanes, len(x)):
        greatest = max(greatest, x[v])
    return greatest


@compiled()
def _masses(n: Numbers, x: Array, scale: tuple[Any, Any], tile: Tile) -> None:
    """Write the masses of at most TILE logits into the tile, then zeros."""
    mass, rounded, whole = tile
    heat, peak = scale
    (zero, least, per_ln2, rounder, ln2_high, ln2_low), series, (bias, shift) = n
    for k in range(len(x)):
        z = x[k] / heat - peak
        # Written so that NaN stays NaN.
        z = least if z < least else z
        up = z * per_ln2 + rounder
        power = up - rounder
        rest = z - power * ln2_high - power * ln2_low
        total = series[0]
        for factor in series[1:]:
            total = total * rest + factor
        rounded[k] = up
        mass[k] = zero if z <= least else total
    # The same numbers, viewed as integers and back: one loop each, so that all are vectorized.
    bits = rounded.view(whole.dtype)
    for k in range(len(x)):
        whole[k] = (bits[k] + bias) << shift
    power_of_two = whole.view(mass.dtype)
    for k in range(len(x)):
        mass[k] *= power_of_two[k]
    mass[len(x) :] = zero


@compiled()
def _halved(numbers: Array) -> Any:
    """As `sampling_plain._halved`; overwrites the first half."""
    half = len(numbers) // 2
    while half > 0:
        for k in range(half):
            numbers[k] += numbers[k + half]
        half //= 2
    return numbers[0]


@compiled()
def _add_up(n: Numbers, x: Array, scale: tuple[Any, Any], tile: Tile, sums: Array) -> None:
    for first in range(0, len(x), TILE):
        _masses(n, x[first : first + TILE], scale, tile)
        sums[first // TILE] = _halved(tile[0])


@compiled()
def _logprob(logit: Any, scale: tuple[Any, Any], sums: Array) -> float:
    heat, peak = scale
    return np.float64(logit / heat - peak) - math.log(_halved(sums))


@compiled()
def _first_equal(x: Array, value: Any) -> int:
    for v in range(len(x)):
        if x[v] == value:
            return v
    return 0


@compiled()
def _chosen(n: Numbers, x: Array, scale: tuple[Any, Any], sizes: tuple[Tile, Array], uniform: float) -> int:
    tile, sums = sizes
    total = 0.0
    for c in range(len(sums)):
        total += sums[c]
    threshold, below, first = uniform * total, 0.0, 0
    for c in range(len(sums)):
        if below + sums[c] > threshold:
            first = c * TILE
            break
        below += sums[c]
    _masses(n, x[first : first + TILE], scale, tile)
    # Sequential sums may be slightly less than pairwise sums; then the last token with mass is chosen.
    mass, _, _ = tile
    chosen, left = first, threshold - below
    passed = 0.0
    for k in range(len(mass)):
        if mass[k] > 0:
            chosen = first + k
            passed += np.float64(mass[k])
            if passed > left:
                break
    return chosen


@compiled()
def _truncate(n: Numbers, logit: Array, columns: tuple[Array, ...], num_parts: int, part: int) -> None:
    heat, top_k, top_p, min_p = columns
    tile, _ = _buffers(n, logit)
    num_tokens = logit.shape[1]
    found = (
        np.empty(num_tokens),
        np.empty(num_tokens, np.int16),
        np.empty(LAST_BUCKET + 2, np.int64),
        np.empty(LAST_BUCKET + 2),
    )
    start, stop = bounds(len(logit), num_parts, part)
    for row in range(start, stop):
        x = logit[row]
        _sort_into_buckets(n, x, heat[row], min_p[row], tile, found)
        max_count = top_k[row] if top_k[row] > 0 else num_tokens
        max_mass = np.inf
        if top_p[row] < 1:
            max_mass = top_p[row] * _likeliest(x, found, max_count, np.inf)[2]
        bucket, kept, _ = _likeliest(x, found, max_count, max_mass)
        kept_x = x[kept]
        for v in range(num_tokens):
            if found[1][v] >= bucket:
                x[v] = -np.inf
        for k in range(len(kept)):
            x[kept[k]] = kept_x[k]


@compiled()
def _sort_into_buckets(n: Numbers, x: Array, heat: Any, min_p: float, tile: Tile, found: Arrays) -> None:
    """Find mass and bucket of each token, count and mass of each bucket; one more is below min-p."""
    share, bucket, count, mass = found
    peak = _greatest(x) / heat
    count[:] = 0
    mass[:] = 0
    for first in range(0, len(x), TILE):
        part = x[first : first + TILE]
        _masses(n, part, (heat, peak), tile)
        for k in range(len(part)):
            depth = (peak - part[k] / heat) * BUCKETS_PER_NAT
            b = int(depth) if depth < LAST_BUCKET else LAST_BUCKET
            if tile[0][k] < min_p:
                b = LAST_BUCKET + 1
            share[first + k] = tile[0][k]
            bucket[first + k] = b
            count[b] += 1
            mass[b] += share[first + k]


@compiled()
def _likeliest(x: Array, found: Arrays, max_count: int, max_mass: float) -> tuple[int, Array, float]:
    """Return the last bucket (all before it are complete), its tokens, and the mass, up to the limits."""
    share, bucket, count, mass = found
    taken, held = 0, 0.0
    for b in range(LAST_BUCKET + 1):
        if taken + count[b] > max_count or held + mass[b] > max_mass:
            tokens = np.nonzero(bucket == b)[0]
            tokens = tokens[np.argsort(-x[tokens], kind="mergesort")]
            num_kept = 0
            for token in tokens:
                if taken + num_kept >= max_count or held >= max_mass:
                    break
                held += share[token]
                num_kept += 1
            return b, tokens[:num_kept], held
        taken += count[b]
        held += mass[b]
    return LAST_BUCKET + 1, np.empty(0, np.int64), held


@compiled()
def _sample_all(
    n: Numbers, logit: Array, columns: tuple[Array, ...], num_parts: int, num_members: int
) -> None:
    share_out(_sample, (n, logit, columns, num_parts), num_parts, num_members)


@compiled()
def _row_logprob_all(
    n: Numbers, logit: Array, columns: tuple[Array, ...], num_parts: int, num_members: int
) -> None:
    share_out(_row_logprob, (n, logit, columns, num_parts), num_parts, num_members)


@compiled()
def _truncate_all(
    n: Numbers, logit: Array, columns: tuple[Array, ...], num_parts: int, num_members: int
) -> None:
    share_out(_truncate, (n, logit, columns, num_parts), num_parts, num_members)
