"""The scan and GAE as Triton kernels: one pass, parallel over segments and inside a long one.

T = packed tokens, B = segments. A row is cut into tiles. A tile loads its tokens once, scans them on chip,
publishes its last A as a linear function of the carry (A = value + share * carry), looks back over the values
published by the tiles before it until the carry is known, and stores its results once (Merrill and Garland
2016, "Single-pass parallel prefix scan with decoupled look-back"; reduce-then-scan in two kernels would read
everything twice). "Before" and "last" refer to the order of the scan: in reverse, the tile to the left comes
after.

Two properties make the look-back safe. An atomic counter assigns the tiles, so a tile waits only for tiles
that already run. And each number has a word of its own, initialized to UNSET: any other content is the number
itself, so the writes need no ordering.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a tile: 256 threads hold them in 64 registers each, so that a multiprocessor runs four tiles.
BLOCK = {torch.float32: 2048, torch.float64: 1024}
NUM_WARPS = 8
# Tiles read in one step of the look-back: one per thread. Two threads that poll the same tile might disagree
# on whether it is set.
WINDOW = 32 * NUM_WARPS
# The bits of a NaN that arithmetic does not produce.
UNSET = tl.constexpr(-1)


def linear_scan(x_T: Tensor, w_T: Tensor, out_T: Tensor, *, reverse: bool) -> None:
    """Compute out_t = x_t + w_t out_{t+1}, or out_{t-1} forward; all of one dtype, contiguous."""
    if len(x_T) == 0:
        return
    state, num_tiles, options = _prepared(x_T)
    with torch.cuda.device_of(x_T):
        _linear_scan[(num_tiles,)]((x_T, w_T, out_T), state, len(x_T), num_tiles, REVERSE=reverse, **options)


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    length_B: Tensor,
    out: tuple[Tensor, Tensor],
    *,
    gamma: float,
    decay_B: Tensor,
    bootstrap_B: Tensor,
) -> None:
    """Write advantage and return into `out`; arguments as in `linear_scan.gae`, of one dtype, contiguous."""
    if len(value_T) == 0:
        return
    state, num_tiles, options = _prepared(value_T)
    carry = _carry_dtype(value_T)
    end_B = length_B.cumsum(0)
    # The segment of the first token of each tile; after the last tile, the last segment.
    start = torch.arange(num_tiles + 1, device=value_T.device) * options["BLOCK"]
    segment = torch.searchsorted(end_B, start.clamp_(max=len(value_T) - 1), right=True, out_int32=True)
    # A scalar argument of a kernel becomes float32; a tensor keeps its dtype.
    gamma_1 = torch.full((1,), gamma, dtype=carry, device=value_T.device)
    segments = (segment, end_B, decay_B.to(value_T.device, carry), bootstrap_B.contiguous(), gamma_1)
    with torch.cuda.device_of(value_T):
        _gae[(num_tiles,)]((reward_T, value_T, *out), segments, state, len(value_T), num_tiles, **options)


def _carry_dtype(row_T: Tensor) -> torch.dtype:
    return torch.promote_types(row_T.dtype, torch.float32)


def _prepared(row_T: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
    """Return the states, the number of tiles, and the compile-time options of the kernels.

    Each state is UNSET: three for each tile (share, value, and last A) and the counter that assigns tiles.
    """
    wide = _carry_dtype(row_T) == torch.float64
    block = BLOCK[_carry_dtype(row_T)]
    num_tiles = triton.cdiv(len(row_T), block)
    word = torch.int64 if wide else torch.int32
    state = torch.full((3 * num_tiles + 1,), UNSET.value, dtype=word, device=row_T.device)
    carry = tl.float64 if wide else tl.float32
    return state, num_tiles, {"CARRY": carry, "BLOCK": block, "WINDOW": WINDOW, "num_warps": NUM_WARPS}


@triton.jit
def _linear_scan(
    rows: tl.tensor,
    state: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    REVERSE: tl.constexpr,
    CARRY: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    x, w, out = rows
    place = _next_place(state, num_tiles)
    start = (num_tiles - 1 - place if REVERSE else place) * BLOCK
    k = tl.arange(0, BLOCK)
    inside = k < num_tokens - start
    share = tl.load(w + start + k, inside, other=0).to(CARRY)
    value = tl.load(x + start + k, inside, other=0).to(CARRY)
    share, value = tl.associative_scan((share, value), 0, _follow, reverse=REVERSE)
    carry = _carry(share, value, state, place, num_tiles, LAST=0 if REVERSE else BLOCK - 1, WINDOW=WINDOW)
    tl.store(out + start + k, tl.where(share == 0, value, value + share * carry), inside)


@triton.jit
def _gae(
    rows: tl.tensor,
    segments: tl.tensor,
    state: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    CARRY: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    reward, value, advantage, returns = rows
    segment, end, decay, bootstrap, gamma = segments
    place = _next_place(state, num_tiles)
    tile = num_tiles - 1 - place
    start = tile * BLOCK
    k = tl.arange(0, BLOCK)
    inside = k < num_tokens - start
    b = _segment_of(k, end, start, segment + tile)
    last = tl.load(end + b) - start == k + 1
    # Memory after the row is arbitrary; the share of the last token is 0, which excludes it.
    r = tl.load(reward + start + k, inside).to(CARRY)
    v = tl.load(value + start + k, inside).to(CARRY)
    after = tl.load(value + start + 1 + k, inside & (last == 0))
    after = tl.where(last, tl.load(bootstrap + b, last), after).to(CARRY)
    share = tl.where(last, 0, tl.load(decay + b))
    delta = r + tl.load(gamma) * after - v
    share, a = tl.associative_scan((share, delta), 0, _follow, reverse=True)
    carry = _carry(share, a, state, place, num_tiles, LAST=0, WINDOW=WINDOW)
    a = tl.where(share == 0, a, a + share * carry)
    tl.store(advantage + start + k, a, inside)
    tl.store(returns + start + k, a + v, inside)


@triton.jit
def _follow(far_share: tl.tensor, far_value: tl.tensor, share: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Compose the linear functions of two neighbours; a share of 0 blocks even NaN."""
    return far_share * share, tl.where(share == 0, value, value + share * far_value)


@triton.jit
def _add(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a + b


@triton.jit
def _next_place(state: tl.tensor, num_tiles: tl.tensor) -> tl.tensor:
    """Return the index of the next tile in the order of the scan; int64, so that no address overflows."""
    return tl.atomic_add(state + 3 * num_tiles, 1, sem="relaxed").to(tl.int64) - UNSET


@triton.jit
def _segment_of(k: tl.tensor, end: tl.tensor, start: tl.tensor, segment: tl.tensor) -> tl.tensor:
    first, final = tl.load(segment), tl.load(segment + 1)
    low = tl.full(k.shape, first, tl.int32)
    high = tl.full(k.shape, final, tl.int32)
    width = final - first
    while width > 0:
        middle = (low + high) // 2
        beyond = tl.load(end + middle) - start > k
        low = tl.where(beyond, low, tl.minimum(middle + 1, final))
        high = tl.where(beyond, middle, high)
        width = width // 2
    return low


@triton.jit
def _carry(
    share: tl.tensor,
    value: tl.tensor,
    state: tl.tensor,
    place: tl.tensor,
    num_tiles: tl.tensor,
    LAST: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Publish this tile's linear function, and find the last A of the tile before it."""
    last = tl.arange(0, share.shape[0]) == LAST
    share = tl.reduce(tl.where(last, share, 0), 0, _add)
    value = tl.reduce(tl.where(last, value, 0), 0, _add)
    _tell(state + place, share)
    _tell(state + num_tiles + place, value)
    carry = tl.full((), 0, value.dtype)
    reach = carry + 1
    nearest = place - 1
    while (nearest >= 0) & (reach != 0):
        before = nearest - tl.arange(0, WINDOW)
        shares, values = _heard(state + before, num_tiles, before >= 0, value.dtype)
        shares, values = tl.associative_scan((shares, values), 0, _follow, reverse=True)
        first = before == nearest
        carry += reach * tl.reduce(tl.where(first, values, 0), 0, _add)
        reach *= tl.reduce(tl.where(first, shares, 0), 0, _add)
        nearest -= WINDOW
    _tell(state + 2 * num_tiles + place, tl.where(share == 0, value, value + share * carry))
    return carry


@triton.jit
def _tell(word: tl.tensor, number: tl.tensor) -> None:
    bits = number.to(word.dtype.element_ty, bitcast=True)
    tl.atomic_xchg(word, tl.where(bits == UNSET, UNSET - 1, bits), sem="relaxed")


@triton.jit
def _heard(word: tl.tensor, num_tiles: tl.tensor, there: tl.tensor, CARRY: tl.constexpr) -> tl.tensor:
    """Wait until some tiles are set; return share and value, share 0 where the last A itself is known."""
    share = there.to(word.dtype.element_ty)
    value, known, waiting = share, share, True
    while waiting:
        share = tl.load(word, there, volatile=True)
        value = tl.load(word + num_tiles, there, volatile=True)
        # Outside the row A is 0.
        known = tl.load(word + 2 * num_tiles, there, other=0, volatile=True)
        missing = (known == UNSET) & ((share == UNSET) | (value == UNSET))
        waiting = tl.reduce(missing.to(tl.int32), 0, _add) > 0
    share = tl.where(known == UNSET, share, 0)
    value = tl.where(known == UNSET, value, known)
    return share.to(CARRY, bitcast=True), value.to(CARRY, bitcast=True)
