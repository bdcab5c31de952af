"""Shared prefixes of a packed row: selects the tokens that outputs depend on, and computes each once.

A decoder's output at a token depends only on this token and the tokens before it in its segment. Tokens after
the last one with a used output, such as the last of an answer, need not be computed. Where segments share a
prefix, as samples of one prompt do, one of them computes the prefix and the others reuse it.

T = tokens of the row, S = those that are computed, N = those that are read, B = segments, L = layers with a
router, K = experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# A beginning that is a smaller part of its segment saves no more than sharing it costs.
LEAST_SHARE = 0.15
# To leave out a smaller part of a row saves no more than it costs.
LEAST_LEFT_OUT = 0.02


@dataclass(frozen=True, slots=True)
class Leading:
    """The tokens of a packed row that lead to those that are read; on the CPU.

    Of them, `kept_S` has the positions in the row, ascending, `length_B` the number in each segment (one of a
    segment of which nothing is read) and `at_N` the indices of those that are read.
    """

    kept_S: Tensor
    length_B: Tensor
    at_N: Tensor


def leading_to(at_N: Tensor, length_B: Tensor) -> Leading | None:
    """Select the tokens that some outputs depend on; None if these are nearly all, or nothing is read."""
    end_B = length_B.cumsum(0)
    start_B = end_B - length_B
    segment_N = torch.searchsorted(end_B, at_N, right=True)
    needed_B = torch.ones_like(length_B)
    needed_B.scatter_reduce_(0, segment_N, at_N - start_B[segment_N] + 1, "amax")
    left_out_B = length_B - needed_B
    if not len(at_N) or left_out_B.sum() < LEAST_LEFT_OUT * length_B.sum():
        return None
    position_T = torch.arange(int(end_B[-1])) - start_B.repeat_interleave(length_B)
    kept_S = (position_T < needed_B.repeat_interleave(length_B)).nonzero()[:, 0]
    shift_B = left_out_B.cumsum(0) - left_out_B
    return Leading(kept_S, needed_B, at_N - shift_B[segment_N])


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Deduplicated prefixes of a packed row: computed tokens, and an index for the others; on the CPU.

    Attributes:
        kept_S: the tokens that are computed, ascending.
        place_T: index in `kept_S` of each token of the row: the same token after the same tokens.
        first_B: position of each segment's first token that is computed for it; earlier tokens are shared
            with other segments.
    """

    kept_S: Tensor
    place_T: Tensor
    first_B: Tensor


def common_beginnings(
    token_T: Tensor, length_B: Tensor, expert_TLK: Tensor | None = None
) -> Beginnings | None:
    """Find prefixes that segments share, routed to the same experts; None if no segment shares enough."""
    known, length = token_T[:, None].int(), length_B.tolist()
    if expert_TLK is not None:
        known = torch.cat([known, expert_TLK.flatten(1).int()], 1)
    known_TM = known.cpu().numpy()
    start = (np.cumsum(length) - length).tolist()
    rows = [known_TM[begin : begin + size] for begin, size in zip(start, length, strict=True)]
    home_T = np.arange(len(known_TM))
    first = [0] * len(rows)
    # Sorted, a segment has as much in common with its neighbour as with any before it.
    order = sorted(range(len(rows)), key=lambda b: rows[b].tobytes())
    for before, b in pairwise(order):
        common = _common(rows[before], rows[b])
        if common >= LEAST_SHARE * length[b]:
            first[b] = common
            home_T[start[b] : start[b] + common] = home_T[start[before] : start[before] + common]
    if not any(first):
        return None
    kept_S = np.flatnonzero(home_T == np.arange(len(home_T)))
    place_T = torch.from_numpy(np.searchsorted(kept_S, home_T))
    return Beginnings(torch.from_numpy(kept_S), place_T, torch.tensor(first))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    apart = np.flatnonzero((one[:size] != other[:size]).any(1))
    return int(apart[0]) if len(apart) else size
