"""Statistics of each token's distribution for the losses, from hidden states, without the whole [N, V].

Log-probability and entropy, the sum of squared probabilities, the divergence from a reference.

N = tokens, D = model width, V = vocabulary, M = tokens of all supports. The logits of a chunk of tokens are
computed, reduced, and freed; the backward recomputes them. Below, z = logits / temperature and
p = softmax(z), over the whole vocabulary or, for a token sampled from a subset of it (its support), over that
subset. A token with non-finite logits gets NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from millrace.kernels import dispatch

# Re-exported: one import for everything that log-probabilities need.
from millrace.kernels.head import Head as Head
from millrace.kernels.head import Supports as Supports
from millrace.kernels.head import runs as runs
from millrace.kernels.sampling import row_logprob
from millrace.kernels.token_logprob_parts import (
    ShardedLogprob,
    add_product,
    at_least_float32,
    merged,
    summed,
    zeros,
)

# float32 elements of one chunk of logits (28 MiB). From 32 MiB on, the C library returns memory to the system
# at once, and the page faults of each chunk cost more than the arithmetic; smaller chunks read the head too
# often.
CHUNK_ELEMENTS = 7 << 20


def rows_per_chunk(weight_VD: Tensor) -> int:
    """Tokens of one chunk: CHUNK_ELEMENTS logits, or an eighth of the head's size if that is more."""
    # With fewer rows, reading the head and adding to its gradient per chunk costs more than the products.
    return max(1, CHUNK_ELEMENTS // weight_VD.shape[0], weight_VD.shape[1] // 8)


def token_logprob(
    hidden_ND: Tensor, head: Head, target_N: Tensor, *, temperature: float, support: Supports | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability log p_target and the entropy -sum_v p_v log p_v, both [N], in nats.

    Both are differentiable, also in weight and bias of the head; without a gradient of the entropy, the
    backward does no work for it. Extra memory is about two chunks of logits (`rows_per_chunk`) for any N; an
    entropy in the loss and a cap on the logits take one more chunk each, supports a few numbers for each of
    their tokens in a chunk. N = 0 gives empty results and a gradient of 0. Outside of a support p is 0, and
    the logits get no gradient; each holds its target. None is the whole vocabulary.

    With a sharded head, each rank of its group calls this with the same tokens and gets the same numbers; in
    the backward each gets the whole gradient of the hidden states and that of its own rows. A target in no
    shard, or on CUDA in no row, has log-probability minus infinity. Ranks all-reduce two tensors [2, N] and
    the gradient.

    Raises:
        ValueError: shapes do not fit, the temperature is not above 0, a support has an id outside the
            vocabulary or lacks its target, or a support is combined with a shard.

    Source for the support: DeepSeek-AI 2025, "DeepSeek-V3.2" ("keep sampling mask").
    """
    _check(hidden_ND, head, temperature, support, shards=True)
    if target_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"target_N has shape {tuple(target_N.shape)}; hidden_ND holds {len(hidden_ND)} tokens"
        )
    if support is not None:
        _check_holds(support, target_N)
    # With a tile the result must have the sampler's bits.
    if support is None and head.tile is None:
        fused = dispatch.fused_logprob(hidden_ND, head.weight_VD)
        if fused is not None:
            return fused(hidden_ND, head, target_N, temperature=temperature)
    return chunked_logprob(hidden_ND, head, target_N, temperature=temperature, support=support)


def chunked_logprob(
    hidden_ND: Tensor, head: Head, target_N: Tensor, *, temperature: float, support: Supports | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprob` by chunks of torch on every device; the arguments are not checked."""
    whole = head.group is None
    measure = _Logprob(head, temperature, support) if whole else ShardedLogprob(head, temperature)
    logprob_N, entropy_N = _Chunked.apply(hidden_ND, head.weight_VD, head.bias_V, target_N, measure)
    return logprob_N, entropy_N


@torch.no_grad()
def token_squares(
    hidden_ND: Tensor, head: Head, *, temperature: float, support: Supports | None = None
) -> Tensor:
    """Compute sum_v p_v^2, [N], without gradient: the collision probability, for the optimal baseline.

    Errors are those of `token_logprob`, and a ValueError for a shard.
    """
    _check(hidden_ND, head, temperature, support)
    square_N = _empty_numbers(hidden_ND)
    for rows, among in _chunks(hidden_ND, head, support):
        square_N[rows] = _z(head, hidden_ND[rows], temperature, among).softmax(1).square_().sum(1)
    return square_N


def token_divergence(
    hidden_ND: Tensor,
    head: Head,
    reference_hidden_ND: Tensor,
    reference_head: Head,
    *,
    temperature: float,
    support: Supports | None = None,
) -> Tensor:
    """Compute KL(p || q) = sum_v p_v (log p_v - log q_v), [N], in nats; q is the reference.

    Differentiable in the policy's hidden states and head; the reference gets no gradient. Extra memory is
    about three chunks of logits. Rounding may leave a divergence of 0 slightly negative. The reference's
    width may differ, but not its vocabulary. The temperature divides the logits of both, and both are over
    the support. Errors are those of `token_logprob`, and a ValueError for a shard.
    """
    _check(hidden_ND, head, temperature, support)
    _check(reference_hidden_ND, reference_head, temperature, name="reference_hidden_ND")
    if len(reference_hidden_ND) != len(hidden_ND):
        raise ValueError(
            f"reference_hidden_ND holds {len(reference_hidden_ND)} tokens, hidden_ND {len(hidden_ND)}"
        )
    if len(reference_head.weight_VD) != len(head.weight_VD):
        raise ValueError(
            f"reference_head has a vocabulary of {len(reference_head.weight_VD)} tokens, "
            f"head one of {len(head.weight_VD)}"
        )
    measure = _Divergence(head, temperature, support, reference_head)
    (divergence_N,) = _Chunked.apply(hidden_ND, head.weight_VD, head.bias_V, reference_hidden_ND, measure)
    return divergence_N


@dataclass(frozen=True, slots=True)
class _Logprob:
    """Log-probability and entropy of a chunk from its z, and d loss / d z from the gradients of those.

    As in `_Divergence`, `numbers` may shift the z of a token, which does not change p; `slope` is linear in
    the gradients, invariant to such a shift, and may overwrite z.
    """

    head: Head
    temperature: float
    support: Supports | None
    num_numbers: ClassVar[int] = 2

    def numbers(self, z_NV: Tensor, target_N: Tensor, among: Supports | None) -> tuple[Tensor, ...]:
        logprob_N = None
        if self.head.tile is not None:
            # The sampler's arithmetic, for the same bits.
            logprob_N = row_logprob(z_NV, target_N, z_NV.new_ones(len(z_NV)))
        z_NV.sub_(z_NV.amax(1, keepdim=True))
        mass_NV = z_NV.exp()
        total_N = mass_NV.sum(1)
        log_total_N = total_N.log()
        if logprob_N is None:
            logprob_N = z_NV.gather(1, target_N[:, None])[:, 0] - log_total_N
        return logprob_N, log_total_N - mass_NV.mul_(z_NV).sum(1) / total_N

    def slope(
        self,
        z_NV: Tensor,
        target_N: Tensor,
        among: Supports | None,
        logprob_gradient_N: Tensor | None,
        entropy_gradient_N: Tensor | None,
    ) -> Tensor:
        # d logprob / d z = onehot(target) - p; d entropy / d z = -p (log p + entropy) = -p (z - E_p[z])
        share_NV = z_NV.softmax(1)
        tilt_NV = None
        if entropy_gradient_N is not None:
            tilt_NV = _tilt(share_NV, z_NV).mul_(entropy_gradient_N[:, None])
        if logprob_gradient_N is None:
            logprob_gradient_N = z_NV.new_zeros(len(z_NV))
        slope_NV = share_NV.mul_(-logprob_gradient_N[:, None])
        slope_NV.scatter_add_(1, target_N[:, None], logprob_gradient_N[:, None])
        return slope_NV if tilt_NV is None else slope_NV.sub_(tilt_NV)


@dataclass(frozen=True, slots=True)
class _Divergence:
    """The divergence from the reference, and its d loss / d z; see `_Logprob`."""

    head: Head
    temperature: float
    support: Supports | None
    reference_head: Head
    num_numbers: ClassVar[int] = 1

    def numbers(
        self, z_NV: Tensor, reference_hidden_ND: Tensor, among: Supports | None
    ) -> tuple[Tensor, ...]:
        gap_NV = _z(self.reference_head, reference_hidden_ND, self.temperature, among).log_softmax(1)
        gap_NV.neg_().add_(z_NV.log_softmax(1))
        return (z_NV.softmax(1).mul_(gap_NV).sum(1),)

    def slope(
        self, z_NV: Tensor, reference_hidden_ND: Tensor, among: Supports | None, gradient_N: Tensor
    ) -> Tensor:
        # d KL / d z = p (log p - log q - KL) = p (x - E_p[x]) with x = z - the reference's z
        share_NV = z_NV.softmax(1)
        gap_NV = z_NV.sub_(_z(self.reference_head, reference_hidden_ND, self.temperature, among))
        return _tilt(share_NV, gap_NV).mul_(gradient_N[:, None])


class _Chunked(torch.autograd.Function):
    """Numbers per token, chunk by chunk; the backward recomputes the logits, unless one chunk held all."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        known_N: Tensor,
        measure: _Logprob | ShardedLogprob | _Divergence,
    ) -> tuple[Tensor, ...]:
        numbers = tuple(_empty_numbers(hidden_ND) for _ in range(measure.num_numbers))
        ctx.kept_NV = None
        for rows, among in _chunks(hidden_ND, measure.head, measure.support):
            z_NV = _z(measure.head, hidden_ND[rows], measure.temperature, among)
            for number_N, chunk_N in zip(numbers, measure.numbers(z_NV, known_N[rows], among), strict=True):
                number_N[rows] = chunk_N
            if len(z_NV) == len(hidden_ND) and measure.head.softcap is None and measure.head.group is None:
                ctx.kept_NV = z_NV
            del z_NV  # freed before the next chunk is allocated
        told_3N = None
        if measure.head.group is not None:
            number_2N, told_3N = merged(torch.stack(numbers)[:, None], measure.head.group)
            numbers = number_2N.unbind()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, known_N, told_3N)
        ctx.measure = measure
        # The gradient of a number that the loss does not use is then None, and costs nothing.
        ctx.set_materialize_grads(False)
        return numbers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, known_N, told_3N = ctx.saved_tensors
        # Removed, since it is overwritten; a second backward through a retained graph recomputes the logits.
        kept_NV, ctx.kept_NV = ctx.kept_NV, None
        factor = ctx.measure.head.scale / ctx.measure.temperature
        hidden_gradient_ND = torch.empty_like(hidden_ND)
        # A frozen head needs neither the memory nor a third of the work.
        weight_gradient_VD = zeros(weight_VD) if ctx.needs_input_grad[1] else None
        bias_gradient_V = None if bias_V is None else zeros(bias_V)
        for rows, among in _chunks(hidden_ND, ctx.measure.head, ctx.measure.support):
            chunks = [None if gradient_N is None else gradient_N[rows] * factor for gradient_N in gradients]
            known = known_N[rows] if told_3N is None else (known_N[rows], told_3N[:, rows])
            slope_NV = _slope(ctx.measure, hidden_ND[rows], known, among, chunks, kept_NV)
            torch.mm(slope_NV, weight_VD, out=hidden_gradient_ND[rows])
            if weight_gradient_VD is not None:
                add_product(weight_gradient_VD, slope_NV.T, hidden_ND[rows])
            if bias_gradient_V is not None:
                bias_gradient_V += slope_NV.sum(0, dtype=bias_gradient_V.dtype)
            del slope_NV
        summed(hidden_gradient_ND, ctx.measure.head.group)
        totals = (weight_gradient_VD, bias_gradient_V)
        of_head = [None if total is None else total.to(weight_VD.dtype) for total in totals]
        return hidden_gradient_ND, *of_head, None, None


def _slope(
    measure: _Logprob | ShardedLogprob | _Divergence,
    hidden_ND: Tensor,
    known: Any,
    among: Supports | None,
    gradients: list[Any],
    z_NV: Tensor | None,
) -> Tensor:
    """Compute the gradient of a chunk's W h + b, [n, V]; given ones are times scale / temperature."""
    bend_NV = None
    if z_NV is None:
        logit_NV, softcap = measure.head.logits(hidden_ND), measure.head.softcap
        if softcap is not None:
            bend_NV = 1 - (logit_NV / softcap).square_()
        z_NV = _truncated(logit_NV.div_(measure.temperature), among)
    slope_NV = measure.slope(z_NV, known, among, *gradients)
    return (slope_NV if bend_NV is None else slope_NV.mul_(bend_NV)).to(hidden_ND.dtype)


def _z(head: Head, hidden_ND: Tensor, temperature: float, among: Supports | None) -> Tensor:
    return _truncated(head.logits(hidden_ND).div_(temperature), among)


def _truncated(z_NV: Tensor, among: Supports | None) -> Tensor:
    if among is None:
        return z_NV
    place = among.row_M, among.token_M
    inside_M = z_NV[place]
    # Not -inf: 0 times -inf is NaN. Non-finite values inside the support must still give NaN.
    z_NV.masked_fill_(among.count_N[:, None] > 0, torch.finfo(z_NV.dtype).min)
    z_NV[place] = inside_M.masked_fill(~inside_M.isfinite(), torch.nan)
    return z_NV


def _tilt(share_NV: Tensor, x_NV: Tensor) -> Tensor:
    """Compute p (x - E_p[x]), in place in x."""
    return x_NV.sub_((share_NV * x_NV).sum(1, keepdim=True)).mul_(share_NV)


def _chunks(
    hidden_ND: Tensor, head: Head, support: Supports | None
) -> Iterator[tuple[slice, Supports | None]]:
    num_rows = rows_per_chunk(head.weight_VD)
    for start in range(0, len(hidden_ND), num_rows):
        rows = slice(start, start + num_rows)
        yield rows, None if support is None else support[rows]


def _empty_numbers(hidden_ND: Tensor) -> Tensor:
    return hidden_ND.new_empty(len(hidden_ND), dtype=at_least_float32(hidden_ND))


def _check(
    hidden_ND: Tensor,
    head: Head,
    temperature: float,
    support: Supports | None = None,
    *,
    name: str = "hidden_ND",
    shards: bool = False,
) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if hidden_ND.shape[1:] != head.weight_VD.shape[1:]:
        raise ValueError(
            f"{name} has shape {tuple(hidden_ND.shape)}, but its head is {tuple(head.weight_VD.shape)}; "
            f"[N, {head.weight_VD.shape[1]}] is needed"
        )
    if head.group is not None and not (shards and support is None):
        raise ValueError(
            "head is a shard of the vocabulary, for which there is only token_logprob without a support; "
            "gather the weight and leave out the group"
        )
    if support is None:
        return
    count_N, token_M = support.count_N, support.token_M
    total = int(count_N.sum())
    if count_N.shape != hidden_ND.shape[:1] or total != len(token_M) or bool((count_N < 0).any()):
        raise ValueError(
            f"support has counts of shape {tuple(count_N.shape)} that add up to {total}, for {len(token_M)} "
            f"tokens; one for each of the {len(hidden_ND)} hidden states is needed, 0 or more"
        )
    unknown_M = (token_M < 0) | (token_M >= len(head.weight_VD))
    if bool(unknown_M.any()):
        raise ValueError(
            f"support holds token {int(token_M[unknown_M][0])}; the vocabulary has {len(head.weight_VD)}"
        )


def _check_holds(support: Supports, target_N: Tensor) -> None:
    row_M = support.row_M
    holds_N = support.count_N == 0
    holds_N[row_M[support.token_M == target_N[row_M]]] = True
    if not bool(holds_N.all()):
        n = int((~holds_N).nonzero()[0, 0])
        raise ValueError(
            f"the support of target_N[{n}] lacks the target itself, token {int(target_N[n])}; "
            "give the tokens that it was drawn among"
        )
