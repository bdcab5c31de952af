"""The packed container: one row of `T` tokens, no padding anywhere.

T = packed tokens, B = segments (one trajectory each), L = layers with a router, K = experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.algorithms.masked import Chosen, chosen
from millrace.data.balancing import deal
from millrace.data.shared_prefix import LEAST_SHARE
from millrace.kernels.token_logprob import Supports, runs


@dataclass(slots=True, eq=False)
class Batch:
    """Segments laid end to end. Every field is a column [T, ...]; `None` fields were not computed.

    Attributes:
        token_T: int64 token ids.
        position_T: int64, counts from 0 in each segment.
        segment_T: int64, 0 to B-1 in order.
        action_mask_T: bool, tokens the policy sampled; of a turn that branches share, in the first of them
            alone. Never the first token of a segment.
        sampler_logprob_T: float32, log-probability under the weights that sampled the token, over its
            support; 0 elsewhere.
        version_T: int64, version of those weights; -1 elsewhere.
        reward_T: float32, each turn's reward on its last chosen token, the outcome's value added at the last
            turn's; 0 elsewhere.
        advantage_T: float32; 0 where the action mask is not set.
        weight_T: float32, or float64 where the weights are: the token's weight in the scalar loss over
            the whole optimizer step.
        reference_logprob_T: float32, under the reference policy; 0 where the action mask is not set.
        proximal_logprob_T: float32, under the weights at the start of the batch; 0 likewise.
        value_T: float32, the critic's value of the state each token was chosen in; 0 likewise.
        return_T: float32, what the critic learns; 0 likewise.
        correction_T: float32, factor of the token's policy loss (importance weight, 0 where rejected).
        selected_T: bool, tokens the policy loss treats separately (Clip-Cov, KL-Cov).
        expert_TLK: int16, the experts that the sampler's layers routed each token to; -1 for a token that it
            did not compute, such as the last sampled one.
        support: the candidate tokens of each sampled token, over which all of its log-probabilities are
            normalized; None if sampling was not truncated. It is indexed by T.
        turn_T: int64, index of each token's turn among those of all trajectories, one after another; None if
            every trajectory is one segment, whose turns are in order.
        episode_T: int64, index of its trajectory, of which each branch is a segment; None likewise.
    """

    token_T: Tensor
    position_T: Tensor
    segment_T: Tensor
    action_mask_T: Tensor
    sampler_logprob_T: Tensor
    version_T: Tensor
    reward_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    reference_logprob_T: Tensor | None = None
    proximal_logprob_T: Tensor | None = None
    value_T: Tensor | None = None
    return_T: Tensor | None = None
    correction_T: Tensor | None = None
    selected_T: Tensor | None = None
    expert_TLK: Tensor | None = None
    support: Supports | None = None
    turn_T: Tensor | None = None
    episode_T: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_T.shape[0]

    @property
    def num_segments(self) -> int:
        """B."""
        return int(self.segment_T[-1]) + 1 if self.num_tokens else 0

    @property
    def unit_T(self) -> Tensor:
        """The episode of each token: what has one reward, one advantage and one weight in the loss."""
        return self.segment_T if self.episode_T is None else self.episode_T

    @property
    def chosen(self) -> Chosen:
        """The positions of the chosen tokens of whole episodes, each in the order of its turns."""
        if self.turn_T is None or self.episode_T is None:
            return chosen(self.action_mask_T, self.segment_T, self.num_segments)
        index_N = self.action_mask_T.nonzero()[:, 0]
        index_N = index_N[self.turn_T[index_N].argsort(stable=True)]
        length_B = torch.bincount(self.episode_T[index_N], minlength=int(self.episode_T[-1]) + 1)
        return Chosen(index_N, length_B, self.num_tokens)

    @property
    def length_B(self) -> Tensor:
        """Tokens in each segment, [B]."""
        return torch.bincount(self.segment_T, minlength=self.num_segments)

    @property
    def chosen_support(self) -> Supports | None:
        """The supports of the chosen tokens alone, in packed order."""
        return None if self.support is None else self.support[self.action_mask_T]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return self._each(lambda column: column.to(device))

    def select(self, segments: list[int]) -> Batch:
        """The named segments, in order, renumbered from 0; ValueError for none or an unknown one."""
        if not segments or min(segments) < 0 or max(segments) >= self.num_segments:
            raise ValueError(f"segments {segments} were asked of a batch of {self.num_segments}")
        index_T, length_B = self.places(segments), self.length_B
        length_B = length_B[torch.tensor(segments, device=length_B.device)]
        batch = self._each(lambda column: column[index_T])
        new_B = torch.arange(len(segments), device=length_B.device)
        batch.segment_T = torch.repeat_interleave(new_B, length_B)
        return batch

    def split(self, max_tokens: int) -> Iterator[Batch]:
        """Micro-batches up to `max_tokens`, whole segments in order; ValueError for a longer segment."""
        spans = micro_batches(self.length_B.tolist(), max_tokens)
        if len(spans) < 2:
            yield self
            return
        for span in spans:
            yield self.select(list(range(span.start, span.stop)))

    def shard(self, rank: int, world: int) -> Batch:
        """Return the shard of one of `world` ranks, with balanced token counts.

        The longest segments are assigned first, each to the rank with the fewest tokens; every rank computes
        the same assignment. ValueError if there are fewer segments than ranks.
        """
        if self.num_segments < world:
            raise ValueError(
                f"{self.num_segments} sequences cannot be dealt to {world} ranks; sample more per step"
            )
        return self.select(self.deal(world)[rank])

    def deal(self, world: int, *, even_tokens: float = math.inf, sharing: bool = False) -> list[list[int]]:
        """Assign segments to `world` ranks so that the work is balanced; some ranks may get none.

        A segment of n tokens costs c(n) = n + n^2 / even_tokens: at `even_tokens`, attention costs as much as
        everything else. With `sharing`, a rank computes shared prompts once: a prompt of n tokens costs c(n)
        once on each rank that has samples of it. See `data.balancing` for the assignment.
        """
        length = self.length_B.tolist()
        work = [n + n**2 / even_tokens for n in length]
        if not sharing:
            return deal(work, [0.0] * len(work), range(len(work)), world)
        prompts = self._prompts()
        saved = [
            len(prompt) + len(prompt) ** 2 / even_tokens if len(prompt) >= LEAST_SHARE * n else 0.0
            for prompt, n in zip(prompts, length, strict=True)
        ]
        return deal(work, saved, [prompt.tobytes() for prompt in prompts], world)

    def _prompts(self) -> list[np.ndarray]:
        mask_T, length_B = self.action_mask_T, self.length_B
        first_B = length_B.scatter_reduce(0, self.segment_T[mask_T], self.position_T[mask_T], "amin")
        token_T, start_B = self.token_T.cpu().numpy(), length_B.cumsum(0) - length_B
        spans = zip(start_B.tolist(), first_B.tolist(), strict=True)
        return [token_T[start : start + first] for start, first in spans]

    def places(self, segments: list[int]) -> Tensor:
        """Return the positions in this batch of the tokens of the given segments, in the order given."""
        length_B = self.length_B
        chosen_B = torch.tensor(segments, device=length_B.device)
        return runs((length_B.cumsum(0) - length_B)[chosen_B], length_B[chosen_B])

    def _each(self, change: Callable[[Tensor | Supports], Tensor | Supports]) -> Batch:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {n: change(column) for n, column in columns.items() if column is not None}
        return replace(self, **changed)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    """As many neighbouring segments as fit into `max_tokens` each time; ValueError for one that is longer."""
    spans: list[slice] = []
    first = size = 0
    for b, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"a sequence has {length} tokens but a micro-batch holds {max_tokens}; "
                f"raise policy.tokens_per_micro_batch to at least {length}"
            )
        if size + length > max_tokens:
            spans.append(slice(first, b))
            first, size = b, 0
        size += length
    return [*spans, slice(first, len(lengths))] if lengths else []
