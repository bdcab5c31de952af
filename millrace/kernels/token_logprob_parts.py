"""Log-probability and entropy over a vocabulary in parts: shards of ranks, or tiles.

N = tokens, V = vocabulary entries of one part, S = parts on this rank.

With z = logits / temperature, each part computes four numbers for a token: its highest z, the z of the target
(minus infinity if the target is in another part), and the sums of exp(z - highest) and exp(z - highest)
(z - highest). These determine the log-probability and the entropy, and three numbers of the whole determine
the gradients, so that ranks exchange columns [N] and never logits.

Source: Shoeybi et al. 2019, "Megatron-LM" (the loss over a sharded vocabulary).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.kernels.head import Head, Supports


def merged(part_4SN: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Reduce the numbers [4, S, N] of this rank's and the group's parts to those of the whole vocabulary.

    Returns:
        log-probability and entropy, [2, N], and the inputs of the gradients, [3, N]: the highest z, and
        relative to it the logarithm of the total and the mean of z. A target in no part has log-probability
        minus infinity. The same bits on every rank of the group.
    """
    top_2N = part_4SN[:2].amax(1)
    _reduce(top_2N, dist.ReduceOp.MAX, group)
    shift_SN = part_4SN[0] - top_2N[0]
    shrink_SN = shift_SN.exp()
    sum_2N = torch.stack(
        [
            (part_4SN[2] * shrink_SN).sum(0),
            shift_SN.mul_(part_4SN[2]).add_(part_4SN[3]).mul_(shrink_SN).sum(0),
        ]
    )
    _reduce(sum_2N, dist.ReduceOp.SUM, group)
    log_total_N, mean_N = sum_2N[0].log(), sum_2N[1] / sum_2N[0]
    number_2N = torch.stack([top_2N[1] - top_2N[0] - log_total_N, log_total_N - mean_N])
    return number_2N, torch.stack([top_2N[0], log_total_N, mean_N])


def summed(gradient_ND: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce the gradient of the hidden states over the parts of the vocabulary, in place."""
    _reduce(gradient_ND, dist.ReduceOp.SUM, group)
    return gradient_ND


def zeros(like: Tensor) -> Tensor:
    """Allocate an accumulator for a gradient: the same shape, float32 or float64."""
    return torch.zeros_like(like, dtype=at_least_float32(like))


def at_least_float32(x: Tensor) -> torch.dtype:
    """Return the dtype in which numbers of such a tensor are summed: its own, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product left @ right to a total, which may have a wider dtype."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)  # saves a tensor of the size of the total
    else:
        total += left @ right


def _reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(x, op=op, group=group)


@dataclass(frozen=True, slots=True)
class ShardedLogprob:
    """The measure of `token_logprob` for a sharded head: one rank's part of the numbers, and its gradients.

    See `token_logprob._Logprob`. The support is always None; truncated sampling needs an unsharded head.
    """

    head: Head
    temperature: float
    support: Supports | None = None
    num_numbers: ClassVar[int] = 4

    def numbers(self, z_NV: Tensor, target_N: Tensor, among: Supports | None) -> tuple[Tensor, ...]:
        """Compute highest, the target's z, total, and moment, [N] each, as `merged` takes them."""
        row_N, here_N = self._rows(z_NV, target_N)
        target_z_N = z_NV.gather(1, row_N[:, None])[:, 0].masked_fill(~here_N, -torch.inf)
        highest_N = z_NV.amax(1)
        z_NV.sub_(highest_N[:, None])
        mass_NV = z_NV.exp()
        total_N = mass_NV.sum(1)
        return highest_N, target_z_N, total_N, mass_NV.mul_(z_NV).sum(1)

    def slope(
        self,
        z_NV: Tensor,
        known: tuple[Tensor, Tensor],
        among: Supports | None,
        logprob_gradient_N: Tensor | None,
        entropy_gradient_N: Tensor | None,
    ) -> Tensor:
        """Compute d loss / d z, [N, V], from the gradients of both numbers; None is 0.

        `known` has the targets, and the inputs of the gradients from `merged`; `among` is always None.
        """
        target_N, (highest_N, log_total_N, mean_N) = known
        z_NV.sub_(highest_N[:, None])
        slope_NV = (z_NV - log_total_N[:, None]).exp_()
        if logprob_gradient_N is None:
            logprob_gradient_N = torch.zeros_like(mean_N)
        if entropy_gradient_N is None:
            slope_NV.mul_(-logprob_gradient_N[:, None])
        else:
            z_NV.sub_(mean_N[:, None]).mul_(-entropy_gradient_N[:, None]).sub_(logprob_gradient_N[:, None])
            slope_NV.mul_(z_NV)
        row_N, here_N = self._rows(z_NV, target_N)
        return slope_NV.scatter_add_(1, row_N[:, None], (logprob_gradient_N * here_N)[:, None])

    def _rows(self, z_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        row_N = target_N - self.head.first_row
        here_N = (row_N >= 0) & (row_N < z_NV.shape[1])
        return row_N.where(here_N, 0), here_N
