"""Canary: log-probabilities of given tokens on the sampler's path, to compare with the trainer's.

Most faults of samplers are in decode steps. So all but the last tokens are computed in one chunk, like a
prompt, and each of the last ones in a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from millrace.kernels.paged_attention import PagedRows
from millrace.kernels.token_logprob import token_logprob
from millrace.models.attention import Paged, new_pools
from millrace.models.decoding import Stack
from millrace.models.facts import facts_of
from millrace.models.load import Model
from millrace.models.logprobs import deterministic, hidden_states, output_head

BLOCK_SIZE = 16
# Tokens at the end that are decoded one by one, after one chunk of the others.
DECODED = 4


@torch.no_grad()
def sampler_logprobs(model: Model, token_ids: Sequence[int]) -> list[float]:
    """Compute the log-probability of each token but the first, at temperature 1, as in sampling.

    There are at least two tokens. The call allocates its own KV pool, so in-flight requests are not affected.
    """
    like = next(model.parameters())
    token_T = torch.tensor(token_ids, device=like.device)
    num_read = len(token_ids) - 1
    num_blocks = -(-num_read // BLOCK_SIZE)
    pools = new_pools(facts_of(model), num_blocks, BLOCK_SIZE, dtype=like.dtype, device=like.device)
    position_T = torch.arange(num_read, device=like.device)
    block_BC = torch.arange(num_blocks, device=like.device, dtype=torch.int32)[None]
    stack: Stack | None = getattr(model, "millrace_stack", None)
    forward = partial(hidden_states, model) if stack is None else stack

    def computed(start: int, count: int) -> Tensor:
        begin_B = position_T[start : start + 1]
        rows = PagedRows(
            block_BC=block_BC,
            start_B=begin_B,
            first_B=torch.zeros_like(begin_B),
            count_B=torch.full_like(begin_B, count),
            slot_T=position_T[start : start + count],
            max_count=count,
            max_length=start + count,
            exact=deterministic(model),
        )
        return forward(token_T[start : start + count], rows.slot_T, Paged(pools, rows))

    chunk = max(1, num_read - DECODED)
    hidden_TD = torch.cat([computed(0, chunk), *(computed(start, 1) for start in range(chunk, num_read))])
    logprob_T, _ = token_logprob(hidden_TD, output_head(model), token_T[1:], temperature=1.0)
    found: list[float] = logprob_T.tolist()
    return found
