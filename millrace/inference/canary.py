"""What a sampler's model says of tokens that nobody draws, to be compared with what the trainer says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from millrace.kernels.token_logprob import token_logprob
from millrace.models.attention import Paged, contiguous_rows, new_pools
from millrace.models.decoding import Stack
from millrace.models.facts import facts_of
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
    like = next(model.parameters())
    token_T = torch.tensor(token_ids, device=like.device)
    num_read = len(token_ids) - 1
    rows = contiguous_rows(torch.tensor([num_read]), block_size=BLOCK_SIZE, device=like.device)
    num_blocks = -(-num_read // BLOCK_SIZE)
    pools = new_pools(facts_of(model), num_blocks, BLOCK_SIZE, dtype=like.dtype, device=like.device)
    position_T = torch.arange(num_read, device=like.device)
    stack: Stack | None = getattr(model, "millrace_stack", None)
    forward = partial(hidden_states, model) if stack is None else stack
    hidden_TD = forward(token_T[:-1], position_T, Paged(pools, rows))
    logprob_T, _ = token_logprob(hidden_TD, output_head(model), token_T[1:], temperature=1.0)
    found: list[float] = logprob_T.tolist()
    return found
