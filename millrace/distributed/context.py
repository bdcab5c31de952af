"""Context parallelism: the tokens of a packed row spread over ranks, so that one long segment spans them all.

A rank embeds, norms and feeds forward its own tokens only; in attention the ranks exchange (`models.ulysses`,
`models.ring`). Each number that a loss needs is computed on the rank that has its token and put together on
all, so every rank has the whole loss. The gradients of the weights are the part of each rank's tokens: they
are summed over the ranks, as over data ranks.

T = tokens of this rank, W = tokens of the whole row, B = segments, N = tokens of the row whose hidden states
are read, M = those of them on this rank, P = ranks, D = model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from millrace.data.batch import Batch
from millrace.distributed.collectives import Peers
from millrace.distributed.mesh import Mesh
from millrace.distributed.ring import Ring
from millrace.distributed.ulysses import Ulysses
from millrace.models.attention import Context
from millrace.models.logprobs import deterministic, hidden_states, packed_context

Kind = Literal["ulysses", "ring"]


def deal(length_B: Tensor, num_ranks: int) -> list[Tensor]:
    """Which tokens of a packed row each rank gets: their places in it, ascending, on the CPU.

    A segment is cut into 2 P chunks of equal size, and rank p gets chunks p and 2 P - 1 - p: a token near the
    end attends to much and one near the beginning to little. Of the tokens left over, each goes to the rank
    with the fewest so far. So token counts differ by at most 1. Attention's work, in pairs of a token and one
    that it sees, is at most 1 % above the mean where segments have some hundred tokens for each rank.

    Args:
        length_B: tokens of each segment.
        num_ranks: P.
    """
    parts: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    held = [0] * num_ranks
    start = 0
    for length in length_B.tolist():
        size, left = divmod(length, 2 * num_ranks)
        chunks = [size] * (2 * num_ranks)
        for _ in range(left):
            rank = held.index(min(held))
            held[rank] += 1
            chunks[rank if chunks[rank] == size else -1 - rank] += 1
        for chunk, count in enumerate(chunks):
            rank = min(chunk, 2 * num_ranks - 1 - chunk)
            parts[rank].append(torch.arange(start, start + count))
            start += count
    return [torch.cat(part) for part in parts]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank computes of a packed row.

    Attributes:
        token_T: its tokens.
        position_T: their positions in their segments.
        context: how their attention reaches the other ranks.
        read_M: which of the N tokens that are read are here.
        row_M: the token of this rank that each of them is.
        num_read: N.
        group: the ranks; None for one.
    """

    token_T: Tensor
    position_T: Tensor
    context: Context
    read_M: Tensor
    row_M: Tensor
    num_read: int
    group: dist.ProcessGroup | None

    def hidden(self, model: PreTrainedModel) -> Tensor:
        """The final hidden states that are read here, [M, D].

        All ranks must call it, and must run the backward of what they made of it, if only of an empty [0, D]:
        in each layer of both the others wait for them.
        """
        return hidden_states(model, self.token_T, self.position_T, self.context)[self.row_M]

    def gather(self, number_M: Tensor) -> Tensor:
        """One number for each token read on this rank, and the other ranks' besides, [N].

        Every rank then makes the same loss of them, which counts once: a number's gradient is that which the
        rank that computed it finds, and is not summed over ranks.
        """
        whole_N = number_M.new_zeros(self.num_read).index_copy(0, self.read_M, number_M)
        # Each sum is of one number and zeros, so it is exact.
        return whole_N if self.group is None else Peers(self.group).leave(whole_N)


def shard_row(model: PreTrainedModel, batch: Batch, mesh: Mesh, at_N: Tensor, *, kind: Kind) -> Share:
    """This rank's share of a packed row. All ranks along `cp` have the same batch.

    Args:
        model: a model from `models.load`.
        batch: the whole row, on the device that computes.
        mesh: its dimension `cp` has the ranks.
        at_N: places of the tokens whose hidden states are read.
        kind: how ranks exchange; `ulysses` is quicker, `ring` asks nothing of the number of heads.

    Raises:
        ValueError: there is no such kind, a deterministic model was to use `ring`, or batches differ.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}; context parallelism is ulysses or ring")
    if kind == "ring" and deterministic(model):
        raise ValueError(
            "a deterministic model cannot use kind ring, whose sums depend on the ranks; use ulysses"
        )
    num_ranks, device, group = mesh.size("cp"), batch.token_T.device, mesh.group("cp")
    if group is not None:
        _check_alike(batch, at_N, group)
    # A row of fewer tokens than ranks is made up by segments of one token, of which nothing is used.
    missing = max(0, num_ranks - batch.num_tokens)
    length_B = torch.cat([batch.length_B.cpu(), torch.ones(missing, dtype=torch.int64)])
    token_W, position_W = (
        torch.cat([column, column.new_zeros(missing)]) for column in (batch.token_T, batch.position_T)
    )
    dealt = deal(length_B, num_ranks)
    place_T = dealt[mesh.rank("cp")].to(device)
    row_N = torch.searchsorted(place_T, at_N).clamp(max=len(place_T) - 1)
    read_M = (place_T[row_N] == at_N).nonzero()[:, 0]
    packed = packed_context(model, length_B.to(device))
    context: Context = packed
    if group is not None and kind == "ulysses":
        context = Ulysses(packed, dealt, group)
    elif group is not None:
        context = Ring(length_B, dealt, group)
    return Share(token_W[place_T], position_W[place_T], context, read_M, row_N[read_M], len(at_N), group)


def _check_alike(batch: Batch, at_N: Tensor, group: dist.ProcessGroup) -> None:
    """Refuse other rows on other ranks, which would wait for each other for ever."""
    # NCCL besides wants all ranks in the first exchange of a group, and a ring may leave some out.
    order_W = torch.arange(1, batch.num_tokens + 1, device=batch.token_T.device)
    numbers = (batch.num_tokens, batch.num_segments, len(at_N), int((batch.token_T * order_W).sum()))
    mine = torch.tensor(numbers, device=batch.token_T.device)
    all_P = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(all_P, mine, group=group)
    tokens, segments, counts, checksums = torch.stack(all_P, 1).tolist()
    if any(other != numbers for other in zip(tokens, segments, counts, checksums, strict=True)):
        raise ValueError(
            f"the ranks along mesh.cp have rows of {tokens} tokens, {segments} segments and {counts} tokens "
            f"that are read, with checksums {checksums}; give all of them the same row"
        )
