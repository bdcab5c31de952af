"""What a sampler's model says of tokens that nobody draws, to be compared with what the trainer says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from millrace.kernels.paged_attention import new_pool
from millrace.kernels.token_logprob import token_logprob
from millrace.models.attention import CacheShape, Paged, contiguous_rows
from millrace.models.decoding import Stack
from millrace.models.load import Model
from millrace.models.logprobs import hidden_states, output_head

BLOCK_SIZE = 16


@torch.no_grad()
def sampler_logprobs(model: Model, token_ids: Sequence[int]) -> list[float]:
    """Log-probability of each token but the first, untempered, as the model computes when it samples.

    Keys and values lie in a pool of this call, so requests in flight notice nothing.

    Args:
        model: a model from `models.load`.
        token_ids: at least two.
    """
    shape, like = CacheShape.of(model.config), next(model.parameters())
    token_T = torch.tensor(token_ids, device=like.device)
    num_read = len(token_ids) - 1
    rows = contiguous_rows(torch.tensor([num_read]), block_size=BLOCK_SIZE, device=like.device)
    size = (-(-num_read // BLOCK_SIZE), shape.num_heads, BLOCK_SIZE, shape.width)
    pools = [new_pool(*size, dtype=like.dtype, device=like.device) for _ in range(shape.num_layers)]
    position_T = torch.arange(num_read, device=like.device)
    stack: Stack | None = getattr(model, "millrace_stack", None)
    forward = partial(hidden_states, model) if stack is None else stack
    hidden_TD = forward(token_T[:-1], position_T, Paged(pools, rows))
    logprob_T, _ = token_logprob(hidden_TD, output_head(model), token_T[1:], temperature=1.0)
    found: list[float] = logprob_T.tolist()
    return found
