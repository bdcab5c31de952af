"""Differentiable collectives over the ranks of a group.

| | forward | backward |
|---|---|---|
| enter, leave | identity, all-reduce | all-reduce, identity |
| gather, scatter | all-gather, reduce-scatter over tokens | reduce-scatter, all-gather over tokens |
| split, whole | own slice, all-gather | all-gather, own slice |
| exchange | all-to-all of rows | all-to-all in reverse |

A tensor that is replicated on all ranks has a replicated gradient. If each rank computes only a part of the
result from it, its gradient is summed over the ranks. T = packed tokens, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

TOKENS, FEATURES = -2, -1
# torch 2.13 renamed both and deprecates the old names.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Peers:
    """A process group of at least one rank; every method is a collective that all ranks call in step."""

    group: dist.ProcessGroup

    def enter(self, x: Tensor) -> Tensor:
        """Pass a replicated tensor on to partial computation: identity, with all-reduce in the backward."""
        return _paired(x, same, self._summed)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors on all ranks: all-reduce, with identity in the backward."""
        return _paired(x, self._summed, same)

    def gather(self, x_TD: Tensor) -> Tensor:
        """All-gather tokens, [..., T, D], for partial computation; reduce-scatter in the backward."""
        return _paired(x_TD, partial(self._joined, dim=TOKENS), self._own_of_sum)

    def scatter(self, x_TD: Tensor) -> Tensor:
        """Reduce-scatter [..., T, D] over tokens, padded with zero rows to a multiple of the ranks."""
        return _paired(self._filled(x_TD), self._own_of_sum, partial(self._joined, dim=TOKENS))

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Slice a replicated tensor along a dimension; tokens are padded as in `scatter`."""
        x = self._filled(x) if dim == TOKENS else x
        return _paired(x, partial(self._own, dim=dim), partial(self._joined, dim=dim))

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """All-gather slices along a dimension, for replicated computation."""
        return _paired(x, partial(self._joined, dim=dim), partial(self._own, dim=dim))

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows (all-to-all); the result is [sum of received, ...], ordered by source rank.

        The rows `x`, [sum of sent, ...], are ordered by destination rank; `sent` and `received` count rows by
        rank.
        """
        there, back = list(sent), list(received)
        return _paired(
            x,
            partial(self._exchanged, sent=there, received=back),
            partial(self._exchanged, sent=back, received=there),
        )

    def _filled(self, x_TD: Tensor) -> Tensor:
        return F.pad(x_TD, (0, 0, 0, -x_TD.shape[TOKENS] % self.group.size()))

    def _summed(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def _own_of_sum(self, x_TD: Tensor) -> Tensor:
        first = x_TD.movedim(TOKENS, 0).contiguous()
        own = first.new_empty(len(first) // self.group.size(), *first.shape[1:])
        _REDUCE_SCATTER(own, first, group=self.group)
        return own.movedim(0, TOKENS)

    def _joined(self, x: Tensor, *, dim: int) -> Tensor:
        # The dimension first, so that the ranks' slices are contiguous; free for one packed row.
        first = x.movedim(dim, 0).contiguous()
        joined = first.new_empty(len(first) * self.group.size(), *first.shape[1:])
        _ALL_GATHER(joined, first, group=self.group)
        return joined.movedim(0, dim).contiguous()

    def _exchanged(self, x: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    def _own(self, x: Tensor, *, dim: int) -> Tensor:
        return x.chunk(self.group.size(), dim)[self.group.rank()].contiguous()


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(slopes[0]), None, None


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(x: Tensor) -> Tensor:
    """Return a view of the tensor itself: the identity for autograd."""
    return x.view_as(x)


def _paired(x: Tensor, there: Change, back: Change) -> Tensor:
    changed: Tensor = _Paired.apply(x, there, back)
    return changed
