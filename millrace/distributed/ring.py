"""Context parallelism with ring attention: keys and values circulate over the ranks.

T = tokens of this rank, U = tokens of the current source rank, W = tokens of the whole row,
B = segments, P = ranks, H = query heads, J = key heads, K = width of queries and keys, V = width of values,
X = K + V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.ring_attention import Softmax, Tiles, attend, attend_backward, lowest_seen
from millrace.models.attention import AttendingContext
from millrace.models.facts import Heads, LayerFacts


@dataclass(frozen=True, slots=True)
class _Plan:
    """Communication plan for one window and chunk.

    At step j, `tiles_P` has the visible tiles of this rank's queries and the keys of the j-th rank before it.
    The keys of each rank travel `hops_P` hops.
    """

    tiles_P: list[Tiles]
    hops_P: list[int]


class Ring(AttendingContext):
    """Ring attention; keys and values travel only as far as a query attends to one of them.

    Source: Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers"; Brandon et al. 2023,
    "Striped attention", for load balance under a causal mask.
    """

    def __init__(self, length_B: Tensor, dealt: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        first_W = (length_B.cumsum(0) - length_B).repeat_interleave(length_B)
        self._place_P, self._first_P = list(dealt), [first_W[place_T] for place_T in dealt]
        self._group, self.rank, self._num_ranks = group, group.rank(), len(dealt)
        self._plans: dict[tuple[int | None, int | None], _Plan] = {}

    def attend(self, of_layer: LayerFacts, heads: Heads, options: dict[str, Any]) -> Tensor:
        """Compute the attention output of this rank's tokens, [T, H, V]."""
        out_THV: Tensor = _Ringed.apply(*heads, self, tuple(options.items()))
        return out_THV

    def plan(self, window: int | None, chunk: int | None, device: torch.device) -> _Plan:
        """Return the cached plan for a window and chunk."""
        limits = window, chunk
        if limits not in self._plans:
            ranks, mine = range(self._num_ranks), (self._place_P[self.rank], self._first_P[self.rank])
            tiles_P = [
                Tiles.of(*mine, self._place_P[self.before(step)], window=window, chunk=chunk).to(device)
                for step in ranks
            ]
            hops_P = [
                max(step for step in ranks if self._sees((source + step) % self._num_ranks, source, limits))
                for source in ranks
            ]
            self._plans[limits] = _Plan(tiles_P, hops_P)
        return self._plans[limits]

    def _sees(self, rank: int, source: int, limits: tuple[int | None, int | None]) -> bool:
        query_T, first_T, key_U = self._place_P[rank], self._first_P[rank], self._place_P[source]
        low_T = lowest_seen(query_T, first_T, window=limits[0], chunk=limits[1])
        num_T = torch.searchsorted(key_U, query_T, right=True) - torch.searchsorted(key_U, low_T)
        return bool(num_T.any())

    def travel(self, own_TJX: Tensor, plan: _Plan) -> Iterator[Tensor | None]:
        """Yield at step j the keys and values of the j-th rank before this one, None if they stop earlier.

        The next transfer overlaps with the computation on the yielded tensor.
        """
        held: Tensor | None = own_TJX
        for step in range(self._num_ranks):
            sends, coming = [], self.coming(step, plan, own_TJX)
            if held is not None and step < plan.hops_P[self.before(step)]:
                sends.append((held, self.before(-1)))
            exchange = self.exchange(sends, [] if coming is None else [(coming, self.before(1))])
            yield held
            for work in exchange:
                work.wait()
            held = coming

    def coming(self, step: int, plan: _Plan, like_TJX: Tensor) -> Tensor | None:
        """Allocate the receive buffer of step j, used at step j + 1; None if nothing is received."""
        source = self.before(step + 1)
        if step >= plan.hops_P[source]:
            return None
        return like_TJX.new_empty(len(self._place_P[source]), *like_TJX.shape[1:])

    def before(self, step: int) -> int:
        """Return the rank `step` places before this one."""
        return (self.rank - step) % self._num_ranks

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> list[dist.Work]:
        """Start asynchronous sends and receives of (tensor, peer rank of the group)."""
        ways = [(dist.isend, sends), (dist.irecv, receives)]
        operations = [
            dist.P2POp(way, tensor, group=self._group, group_peer=peer)
            for way, tensors in ways
            for tensor, peer in tensors
        ]
        return dist.batch_isend_irecv(operations) if operations else []


class _Owed:
    """Gradients of keys and values: they follow the keys, then return from the last rank to the owner."""

    def __init__(self, ring: Ring, plan: _Plan) -> None:
        self._ring, self._plan = ring, plan
        self._home: Tensor | None = None
        self._coming: Tensor | None = None
        self._exchange: list[dist.Work] = []

    def add(self, step: int, part_TJX: Tensor | None, like_TJX: Tensor) -> None:
        """Add this rank's gradient of step j (None without keys) and send the sum to the next rank."""
        ring, hops_P = self._ring, self._plan.hops_P
        self._wait()
        sends, receives = [], []
        if part_TJX is not None:
            owed_TJX = part_TJX if self._coming is None else part_TJX.add_(self._coming)
            source = ring.before(step)
            if source == ring.rank:
                # Replaced by the returning sum, unless the keys stay on this rank.
                self._home = owed_TJX
            if hops_P[source]:
                sends.append((owed_TJX, ring.before(-1) if step < hops_P[source] else source))
        self._coming = ring.coming(step, self._plan, like_TJX)
        if self._coming is not None:
            receives.append((self._coming, ring.before(1)))
        if step == hops_P[ring.rank] > 0:
            self._home = torch.empty_like(like_TJX)
            receives.append((self._home, ring.before(-step)))
        self._exchange = ring.exchange(sends, receives)

    def settled(self) -> Tensor:
        self._wait()
        assert self._home is not None
        return self._home

    def _wait(self) -> None:
        for work in self._exchange:
            work.wait()


class _Ringed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THK: Tensor,
        key_TJK: Tensor,
        value_TJK: Tensor,
        ring: Ring,
        options: tuple[tuple[str, Any], ...],
    ) -> Tensor:
        rest = dict(options)
        plan = ring.plan(rest.pop("window"), rest.pop("chunk"), query_THK.device)
        widths = [key_TJK.shape[2], value_TJK.shape[2]]
        softmax = Softmax.before(query_THK, value_TJK)
        own_TJX = torch.cat([key_TJK, value_TJK], 2)
        for tiles, held_UJX in zip(plan.tiles_P, ring.travel(own_TJX, plan), strict=True):
            if held_UJX is not None:
                key_UJK, value_UJK = held_UJX.split(widths, 2)
                attend(softmax, query_THK, key_UJK, value_UJK, tiles, **rest)
        out_THK, log_total_TH1 = softmax.after()
        ctx.save_for_backward(query_THK, own_TJX, out_THK, log_total_TH1)
        ctx.ring, ctx.plan, ctx.widths, ctx.rest = ring, plan, widths, rest
        return out_THK.to(query_THK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_THK: Tensor) -> tuple[Any, ...]:
        query_THK, own_TJX, out_THK, log_total_TH1 = ctx.saved_tensors
        gradient_THK = gradient_THK.to(out_THK.dtype)
        agreement_TH1 = (gradient_THK * out_THK).sum(-1, keepdim=True)
        of_query_THK = torch.zeros_like(query_THK, dtype=out_THK.dtype)
        owed, wide_TJX = _Owed(ctx.ring, ctx.plan), own_TJX.to(out_THK.dtype)
        for step, held_UJX in enumerate(ctx.ring.travel(own_TJX, ctx.plan)):
            part_UJX = None
            if held_UJX is not None:
                key_UJK, value_UJK = held_UJX.split(ctx.widths, 2)
                part_THK, *of_held = attend_backward(
                    query_THK,
                    key_UJK,
                    value_UJK,
                    ctx.plan.tiles_P[step],
                    log_total_TH1=log_total_TH1,
                    gradient_THK=gradient_THK,
                    agreement_TH1=agreement_TH1,
                    **ctx.rest,
                )
                of_query_THK += part_THK
                part_UJX = torch.cat(of_held, 2)
            owed.add(step, part_UJX, wide_TJX)
        gradients = (of_query_THK, *owed.settled().split(ctx.widths, 2))
        return *(gradient.to(query_THK.dtype) for gradient in gradients), None, None
