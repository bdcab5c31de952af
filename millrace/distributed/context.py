"""Context parallelism: shard the tokens of a packed row, so that a long segment spans all ranks.

Embedding, norms and feed-forward run on a rank's own tokens only; attention communicates (`ulysses`, `ring`).
Each number that a loss needs is computed on the rank of its token and all-gathered, so every rank has the
complete loss. A rank's weight gradients cover its own tokens only. They are summed over the ranks, as over
data-parallel ranks.

T = tokens of this rank, W = tokens of the whole row, B = segments, N = tokens of the row with hidden states
to read, M = those of them on this rank, P = ranks, D = model width.
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
    """Shard the tokens of a packed row: return the indices of each rank's tokens, ascending, on the CPU.

    A segment is cut into 2 P chunks of equal size, and rank p gets chunks p and 2 P - 1 - p. This balances
    the load, because a late token attends to many tokens and an early one to few. Each remaining token goes
    to the rank with the fewest so far, so token counts differ by at most 1. The work of attention, in pairs
    of query and visible key, is at most 1 % above the mean if segments have some hundred tokens per rank.
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
    """One rank's shard of a packed row.

    `read_M` indexes the N tokens to read, `row_M` the shard; both have those tokens to read that are on this
    rank. `group` is None for a single rank.
    """

    token_T: Tensor
    position_T: Tensor
    context: Context
    read_M: Tensor
    row_M: Tensor
    num_read: int
    group: dist.ProcessGroup | None

    def hidden(self, model: PreTrainedModel) -> Tensor:
        """Compute the final hidden states to read on this rank, [M, D].

        All ranks must call it and run the backward of its result, even of an empty [0, D]: every layer
        communicates in both passes.
        """
        return hidden_states(model, self.token_T, self.position_T, self.context)[self.row_M]

    def gather(self, number_M: Tensor) -> Tensor:
        """All-gather one number for each token to read, [N].

        Every rank then computes the same loss from them, which counts once: the gradient of a number is taken
        on the rank that computed it and is not summed over ranks.
        """
        whole_N = number_M.new_zeros(self.num_read).index_copy(0, self.read_M, number_M)
        # Each sum has one non-zero term, so it is exact.
        return whole_N if self.group is None else Peers(self.group).leave(whole_N)


def shard_row(model: PreTrainedModel, batch: Batch, mesh: Mesh, at_N: Tensor, *, kind: Kind) -> Share:
    """Shard a packed row over the mesh dimension `cp`, whose ranks all have the same batch.

    `at_N` are indices of the tokens with hidden states to read. Kind `ulysses` is faster; `ring` works with
    any number of heads.

    Raises:
        ValueError: the kind is unknown, the model is deterministic and the kind `ring`, or batches differ.
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
    # A row with fewer tokens than ranks is padded with segments of one token, which are not read.
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
    # NCCL also needs all ranks in the first operation of a group, and a ring may skip some.
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
