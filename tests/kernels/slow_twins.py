"""Slow twins of kernels: the equation over the whole vocabulary, or for one token and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.kernels.head import Head


def token_logprob_whole(
    hidden_ND: Tensor, head: Head, target_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Reference for `token_logprob`: one log_softmax over all logits at once."""
    logprob_NV = (head.logits(hidden_ND) / temperature).log_softmax(1)
    entropy_N = -(logprob_NV.exp() * logprob_NV).sum(1)
    return logprob_NV.gather(1, target_N[:, None])[:, 0], entropy_N


def token_squares_whole(hidden_ND: Tensor, head: Head, *, temperature: float) -> Tensor:
    """Reference for `token_squares`."""
    return (head.logits(hidden_ND) / temperature).softmax(1).square().sum(1).detach()


def token_divergence_whole(
    hidden_ND: Tensor,
    head: Head,
    reference_hidden_ND: Tensor,
    reference_head: Head,
    *,
    temperature: float,
) -> Tensor:
    """Reference for `token_divergence`."""
    logprob_NV = (head.logits(hidden_ND) / temperature).log_softmax(1)
    reference_NV = (reference_head.logits(reference_hidden_ND) / temperature).log_softmax(1)
    return (logprob_NV.exp() * (logprob_NV - reference_NV.detach())).sum(1)


def packed_attention_loop(
    query_THK: Tensor,
    key_TJK: Tensor,
    value_TJK: Tensor,
    length_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Reference for `packed_attention`: the equation, one token and one head at a time."""
    heads = query_THK.shape[1]
    groups = heads // key_TJK.shape[1]
    rows = []
    start = 0
    for length in length_B.tolist():
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            if chunk is not None:
                first = max(first, start + (i - start) // chunk * chunk)
            for head in range(heads):
                score = key_TJK[first : i + 1, head // groups] @ query_THK[i, head] * scale
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                rows.append(score.softmax(-1) @ value_TJK[first : i + 1, head // groups])
        start += length
    return torch.stack(rows).view(*query_THK.shape[:2], -1)
