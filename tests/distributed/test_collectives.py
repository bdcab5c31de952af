"""What ranks exchange, against what each of them was told to send. Rank p of P, uneven counts, some of 0."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.distributed.collectives import Peers
from tests.close import close_fp64
from tests.ranks import run_ranks

pytestmark = pytest.mark.world

NUM_RANKS = 3
# Rows from rank p (first) to rank q; rank 1 sends none, and rank 0 keeps some.
COUNT_PP = [[2, 0, 3], [0, 0, 0], [1, 4, 0]]


def rows_of(rank: int) -> Tensor:
    """All rows that a rank sends, [rows, 2, 5]."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(COUNT_PP[rank]), 2, 5, generator=generator, dtype=torch.float64)


def slope_of(rank: int) -> Tensor:
    """The gradient of all rows that a rank receives."""
    generator = torch.Generator().manual_seed(10 + rank)
    num_rows = sum(counts[rank] for counts in COUNT_PP)
    return torch.randn(num_rows, 2, 5, generator=generator, dtype=torch.float64)


def exchanged(rank: int) -> dict[str, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    # Not contiguous, as what comes out of attention may be.
    x = rows_of(rank).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    received = [counts[rank] for counts in COUNT_PP]
    out = Peers(group).exchange(x, COUNT_PP[rank], received)
    (gradient,) = torch.autograd.grad(out, x, slope_of(rank), retain_graph=True)
    # A second derivative would not travel, so there is none.
    (once,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()
    return {"out": out, "gradient": gradient}


def test_rows_arrive_by_sender_and_their_gradients_go_home() -> None:
    ranks = run_ranks(NUM_RANKS, exchanged)
    sent = [rows_of(p).split(COUNT_PP[p]) for p in range(NUM_RANKS)]
    for q, found in enumerate(ranks):
        close_fp64(found["out"], torch.cat([sent[p][q] for p in range(NUM_RANKS)]))
    slopes = [slope_of(q).split([counts[q] for counts in COUNT_PP]) for q in range(NUM_RANKS)]
    for p, found in enumerate(ranks):
        close_fp64(found["gradient"], torch.cat([slopes[q][p] for q in range(NUM_RANKS)]))
