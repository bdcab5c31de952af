"""What the ranks of a group do together to tensors that each holds a part of, with the backward it calls for.

| | forward | backward |
|---|---|---|
| enter, leave | nothing, sum | sum, nothing |
| gather, scatter | all tokens, own tokens of the sum | own tokens of the sum, all tokens |
| split, whole | own share, all shares | all shares, own share |
| exchange | rows to the ranks they are for | the way back |

Where a tensor is the same on all ranks, so is its gradient; where each rank goes on to compute a part with
it, its gradient is summed. T = packed tokens, D = model width.
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

TOKENS, FEATURES = -2, -1
# torch 2.13 gave both new names and warns of the old ones.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of a group as each of them sees it; a method is called by all of them in step.

    Attributes:
        group: of at least one rank, this one among them.
    """

    group: dist.ProcessGroup

    def enter(self, x: Tensor) -> Tensor:
        """The same tensor on all ranks, where each begins to compute a part: the gradients are summed."""
        return _paired(x, same, self._summed)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on all of them."""
        return _paired(x, self._summed, same)

    def gather(self, x_TD: Tensor) -> Tensor:
        """All ranks' tokens, [..., T, D], where each begins to compute a part."""
        return _paired(x_TD, partial(self._joined, dim=TOKENS), self._own_of_sum)

    def scatter(self, x_TD: Tensor) -> Tensor:
        """Own tokens of the sum of the ranks' [..., T, D], filled up with rows of 0 so that they divide."""
        return _paired(self._filled(x_TD), self._own_of_sum, partial(self._joined, dim=TOKENS))

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Own share along a dimension of what is the same on all ranks; tokens are filled up likewise."""
        x = self._filled(x) if dim == TOKENS else x
        return _paired(x, partial(self._own, dim=dim), partial(self._joined, dim=dim))

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """All shares along a dimension; what follows is the same on all ranks."""
        return _paired(x, partial(self._joined, dim=dim), partial(self._own, dim=dim))

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows from every rank, [sum of received, ...], those of the first rank first (an all-to-all).

        Args:
            x: rows for the first rank, then for the next, and so on, [sum of sent, ...].
            sent: how many go to each rank.
            received: how many come from each.
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
        # The dimension first, so that the ranks' shares lie one after the other; free for one packed row.
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
    """One function in the forward, another in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(slopes[0]), None, None


def same(x: Tensor) -> Tensor:
    """Itself."""
    return x.view_as(x)


def _paired(x: Tensor, there: Change, back: Change) -> Tensor:
    changed: Tensor = _Paired.apply(x, there, back)
    return changed
