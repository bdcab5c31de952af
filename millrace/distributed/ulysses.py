"""Context parallelism over heads: an all-to-all gives each rank all tokens for its slice of the heads.

Each rank computes attention as a single process would. A second all-to-all returns the outputs to the ranks
of their tokens.

T = tokens of this rank, W = tokens of the whole row, P = ranks, H = query heads, J = key heads, K = head
width, X = numbers per token that one rank receives, S = T P rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.distributed.collectives import Peers
from millrace.models.attention import AttendingContext, Packed, attend_packed
from millrace.models.facts import Heads, LayerFacts


class Ulysses(AttendingContext):
    """Attention with a slice of the heads per rank, over the whole row.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """

    def __init__(self, packed: Packed, dealt: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._packed = packed
        self._peers = Peers(group)
        self._counts = [len(place_T) for place_T in dealt]
        place_W = torch.cat(list(dealt))
        device = packed.segments.buckets[0].length_B.device
        self._place_W, self._arrival_W = place_W.to(device), place_W.argsort().to(device)

    def attend(self, of_layer: LayerFacts, heads: Heads, options: dict[str, Any]) -> Tensor:
        """Compute the attention output of this rank's tokens, [T, H, K].

        The number of query heads must be divisible by the ranks, or it is a ValueError.
        """
        query_THK, key_TJK, value_TJV = heads
        num_ranks, (num_tokens, num_heads, _) = len(self._counts), query_THK.shape
        if num_heads % num_ranks:
            raise ValueError(
                f"mesh.cp is {num_ranks}, which does not divide the {num_heads} query heads that ulysses "
                "deals out; choose a cp that does, or the kind ring"
            )
        # With fewer key heads than ranks, several ranks get a copy of the same head.
        copies = num_ranks // math.gcd(key_TJK.shape[1], num_ranks)
        key_TJK, value_TJV = (x.repeat_interleave(copies, 1) for x in (key_TJK, value_TJV))
        parts = [x.reshape(num_tokens, num_ranks, -1) for x in (query_THK, key_TJK, value_TJV)]
        own = self._to_heads(torch.cat(parts, 2)).split([part.shape[2] for part in parts], 1)
        query, key, value = (
            part.unflatten(1, (-1, x.shape[2]))
            for part, x in zip(own, (query_THK, key_TJK, value_TJV), strict=True)
        )
        out = attend_packed((query, key, value), self._packed, options)
        return self._to_tokens(out.flatten(1)).reshape(num_tokens, num_heads, -1)

    def _to_heads(self, x_TPX: Tensor) -> Tensor:
        """Return this rank's slice of the heads for all tokens, [W, X]."""
        num_tokens, num_ranks, _ = x_TPX.shape
        x_WX = self._peers.exchange(
            x_TPX.transpose(0, 1).flatten(0, 1), [num_tokens] * num_ranks, self._counts
        )
        return x_WX.index_select(0, self._arrival_W)

    def _to_tokens(self, x_WX: Tensor) -> Tensor:
        num_ranks, num_tokens = len(self._counts), self._counts[self._peers.group.rank()]
        x_WX = x_WX.index_select(0, self._place_W)
        x_SX = self._peers.exchange(x_WX, self._counts, [num_tokens] * num_ranks)
        return x_SX.unflatten(0, (num_ranks, num_tokens)).transpose(0, 1)
