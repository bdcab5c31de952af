"""Log-probability and entropy of chosen tokens from hidden states, never holding a whole [N, V].

N = tokens, D = model width, V = vocabulary. The logits of a chunk of tokens are made, reduced, and dropped;
the backward makes them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# float32 elements of one chunk of logits (64 MiB).
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Head:
    """What turns a hidden state into logits: softcap * tanh(scale (W h + b) / softcap).

    Attributes:
        weight_VD: the output embedding.
        bias_V: its bias, if any.
        scale: factor of the logits (Cohere, Granite).
        softcap: bound of the logits (Gemma 2); None leaves them.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits in float32 (float64 stays float64), [N, V]."""
        logit_NV = F.linear(hidden_ND, self.weight_VD, self.bias_V)
        logit_NV = logit_NV if logit_NV.dtype == torch.float64 else logit_NV.float()
        if self.scale != 1.0:
            logit_NV = logit_NV * self.scale
        if self.softcap is not None:
            logit_NV = self.softcap * torch.tanh(logit_NV / self.softcap)
        return logit_NV


def token_logprob(
    hidden_ND: Tensor, head: Head, target_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log softmax(logits / temperature)[target] and the entropy of that distribution, both [N].

    Extra memory is one chunk of logits, whatever N and V. The entropy is a measurement: no gradient flows
    through it.

    Args:
        hidden_ND: final hidden states, one per token to be judged.
        head: the output head; gradients flow to its weight and bias.
        target_N: the tokens, integers in [0, V).
        temperature: above 0.
    """
    bias_V = head.bias_V
    logprob_N, entropy_N = _TokenLogprob.apply(hidden_ND, head.weight_VD, bias_V, target_N, head, temperature)
    return logprob_N, entropy_N


def token_logprob_whole(
    hidden_ND: Tensor, head: Head, target_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The plain twin of `token_logprob`: one log_softmax over all logits at once."""
    logprob_NV = (head.logits(hidden_ND) / temperature).log_softmax(1)
    entropy_N = -(logprob_NV.exp() * logprob_NV).sum(1)
    return logprob_NV.gather(1, target_N[:, None])[:, 0], entropy_N.detach()


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        head: Head,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
        logprobs, entropies = [], []
        for hidden, target in zip(hidden_ND.split(chunk), target_N.split(chunk), strict=True):
            logit = head.logits(hidden).div_(temperature)
            norm = logit.logsumexp(1)
            logprobs.append(logit.gather(1, target[:, None])[:, 0] - norm)
            share = (logit - norm[:, None]).exp_()
            entropies.append(norm - share.mul_(logit).sum(1))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N)
        ctx.head, ctx.temperature, ctx.chunk = head, temperature, chunk
        logprob_N, entropy_N = torch.cat(logprobs), torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        hidden_ND, weight_VD, bias_V, target_N = ctx.saved_tensors
        head, temperature, chunk = ctx.head, ctx.temperature, ctx.chunk
        hidden_gradient = torch.empty_like(hidden_ND)
        weight_gradient = torch.zeros_like(
            weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32)
        )
        bias_gradient = None if bias_V is None else torch.zeros_like(bias_V, dtype=weight_gradient.dtype)
        start = 0
        for hidden, target, gradient in zip(
            hidden_ND.split(chunk), target_N.split(chunk), gradients[0].split(chunk), strict=True
        ):
            logit = head.logits(hidden)
            # d logprob / d (logit / temperature) = onehot(target) - softmax
            slope = (logit / temperature).softmax(1).mul_(-gradient[:, None])
            slope.scatter_add_(1, target[:, None], gradient[:, None].to(slope.dtype))
            slope.mul_(head.scale / temperature)
            if head.softcap is not None:
                slope.mul_(1 - (logit / head.softcap).square())
            slope = slope.to(hidden.dtype)
            stop = start + hidden.shape[0]
            torch.mm(slope, weight_VD, out=hidden_gradient[start:stop])
            weight_gradient += slope.T @ hidden
            if bias_gradient is not None:
                bias_gradient += slope.sum(0)
            start = stop
        bias_gradient = None if bias_V is None or bias_gradient is None else bias_gradient.to(bias_V.dtype)
        return hidden_gradient, weight_gradient.to(weight_VD.dtype), bias_gradient, None, None, None
