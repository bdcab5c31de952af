"""Packing of trajectories and demonstrations into batches. Token weights are fixed here, once.

T = packed tokens, N = trajectories, S = turns in each of their branches, M = tokens of all supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from millrace.data.batch import Batch
from millrace.kernels.token_logprob import Supports
from millrace.types import Trajectory, Turn

TokenWeights = Callable[[Tensor, Tensor], Tensor]


def pack(trajectories: Sequence[Trajectory]) -> Batch:
    """Pack scored trajectories into one row; advantages and token weights are 0 until they are estimated.

    Each branch of a trajectory is a segment, those of a trajectory in the order of their last turns. The
    tokens of a turn are chosen in its first branch alone, and context in the others. If sampling was
    truncated, the sampler's log-probabilities become those over the supports.

    Raises ValueError if there are none, one was not scored or failed, one begins with a token of the policy's
    own, a turn without a token has a reward, the support of a token is empty, or experts are known of some
    trajectories only or of other tokens.
    """
    if not trajectories:
        raise ValueError("there are no trajectories to pack")
    row, spans = _Row(), list(_spans(trajectories))
    for span in spans:
        row.add(span)
    lengths = [sum(_length(span.turn) for span in of_one) for of_one in _by_branch(spans)]
    position_T, segment_T = _places(lengths)
    reward_T = torch.zeros(len(row.mask))
    reward_T[torch.tensor(row.last_actions)] = torch.tensor(row.rewards)
    length_S = torch.tensor([_length(span.turn) for span in spans])
    branched = spans[-1].branch + 1 > len(trajectories)
    return Batch(
        token_T=torch.tensor(list(chain.from_iterable(row.tokens))),
        position_T=position_T,
        segment_T=segment_T,
        action_mask_T=torch.tensor(row.mask),
        sampler_logprob_T=torch.tensor(row.logprobs),
        version_T=torch.tensor(row.versions),
        reward_T=reward_T,
        advantage_T=torch.zeros(len(row.mask)),
        weight_T=torch.zeros(len(row.mask)),
        expert_TLK=_experts(_by_branch(spans)),
        turn_T=torch.tensor([s.number for s in spans]).repeat_interleave(length_S) if branched else None,
        episode_T=torch.tensor([s.episode for s in spans]).repeat_interleave(length_S) if branched else None,
        support=_supports(spans),
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """A turn in one of its branches.

    `number` is the turn's among those of all trajectories, `reward` the turn's, `is_chosen` whether this is
    the first branch that has the turn, and `is_last` whether the turn is the last of its trajectory.
    """

    turn: Turn
    number: int
    episode: int
    branch: int
    reward: float
    is_chosen: bool
    is_last: bool


def _spans(trajectories: Sequence[Trajectory]) -> Iterator[_Span]:
    first = branch = 0
    for episode, trajectory in enumerate(trajectories):
        if trajectory.outcome is None or trajectory.outcome.kind == "failed":
            raise ValueError("a trajectory without a score cannot be trained on")
        rewards, seen = trajectory.turn_rewards, set[int]()
        for path in trajectory.branches:
            if not trajectory.turns[path[0]].observation:
                raise ValueError(
                    "a trajectory begins with a token of the policy; its first observation is empty"
                )
            for at in path:
                is_last = at == len(rewards) - 1
                turn = trajectory.turns[at]
                yield _Span(turn, first + at, episode, branch, rewards[at], at not in seen, is_last)
            seen.update(path)
            branch += 1
        first += len(rewards)


def _by_branch(spans: Sequence[_Span]) -> list[list[_Span]]:
    return [list(each) for _, each in groupby(spans, lambda span: span.branch)]


def _length(turn: Turn) -> int:
    return len(turn.observation) + len(turn.completion.token_ids)


@dataclass(slots=True)
class _Row:
    """Columns of the packed row as they grow; `last_actions` are positions of `rewards`."""

    tokens: list[Sequence[int]] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    last_actions: list[int] = field(default_factory=list)

    def add(self, span: _Span) -> None:
        """Append the tokens of a turn, the completion as context if it is not chosen here."""
        turn, completion = span.turn, span.turn.completion
        given = len(turn.observation)
        scored = completion if completion.support is None else completion.support
        self.tokens += (turn.observation, completion.token_ids)
        if not span.is_chosen:
            given += len(completion.token_ids)
        self.mask += [False] * given
        self.logprobs += [0.0] * given
        self.versions += [-1] * given
        if not span.is_chosen:
            return
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += scored.logprobs.tolist()
        self.versions += completion.versions.tolist()
        if completion.token_ids or span.is_last:
            self.rewards.append(span.reward)
            self.last_actions.append(len(self.mask) - 1)
        elif span.reward:
            raise ValueError("a turn without a sampled token has a reward; reward the turn before it")


def pack_demonstrations(
    demonstrations: Sequence[Sequence[Sequence[int]]], token_weights: TokenWeights
) -> Batch:
    """Demonstrations of one optimizer step as one packed row.

    Each is the prompt's tokens and the completion's; of an episode, further replies and completions follow.
    Every completion token counts as chosen; what only sampling knows is 0 (versions -1). ValueError if there
    are none, or a prompt or a completion is empty.
    """
    if not demonstrations or not all(
        len(spans) % 2 == 0 and len(spans[0]) and all(map(len, spans[1::2])) for spans in demonstrations
    ):
        raise ValueError(
            "supervised training needs pairs of a prompt and a completion, neither of them empty"
        )
    lengths = [sum(map(len, spans)) for spans in demonstrations]
    position_T, segment_T = _places(lengths)
    each = [(place % 2 == 1, span) for spans in demonstrations for place, span in enumerate(spans)]
    mask_T = torch.tensor([chosen for chosen, span in each for _ in span])
    zero_T = torch.zeros(len(mask_T))
    return Batch(
        token_T=torch.tensor([token for _, span in each for token in span]),
        position_T=position_T,
        segment_T=segment_T,
        action_mask_T=mask_T,
        sampler_logprob_T=zero_T,
        version_T=torch.full_like(segment_T, -1),
        reward_T=zero_T,
        advantage_T=zero_T,
        weight_T=token_weights(mask_T, segment_T),
    )


def with_gradient(batch: Batch) -> Batch | None:
    """The segments that have an advantage other than 0, or None if none has.

    Where the loss is a multiple of the advantage, the others add exactly nothing to the gradient, and their
    weights are already fixed, so leaving them out saves time and changes no number.
    """
    moving_B = torch.zeros(batch.num_segments, dtype=torch.bool).index_put(
        (batch.segment_T[batch.advantage_T != 0],), torch.tensor(True)
    )
    chosen = moving_B.nonzero()[:, 0].tolist()
    if not chosen:
        return None
    return batch if len(chosen) == batch.num_segments else batch.select(chosen)


def without_duplicates(batch: Batch) -> Batch:
    """Deduplicate segments; each keeps the summed token weights of its duplicates.

    Duplicates agree in every field but their weight, as short answers to one prompt often do. Their losses
    are equal, so one forward and backward with the sum of their weights gives the same loss and gradient.
    """
    apart = ("position_T", "segment_T", "weight_T", "turn_T", "episode_T", "support")
    names = [column.name for column in fields(Batch) if column.name not in apart]
    first_equal = _first_equals(batch, names)
    kept = sorted(set(first_equal))
    if len(kept) == batch.num_segments:
        return batch
    # Duplicates are equally long, so token t of a duplicate adds to token t of the segment that is kept.
    target_T = _starts(batch)[torch.tensor(first_equal)[batch.segment_T]] + batch.position_T
    summed_T = torch.zeros_like(batch.weight_T).index_add(0, target_T, batch.weight_T)
    return replace(batch, weight_T=summed_T).select(kept)


def once_each(batch: Batch) -> tuple[Batch, Tensor]:
    """Deduplicate sequences; return the unique ones, and the index of each token of `batch` in them, [T].

    The scores of a token depend only on the sequence, on the experts it is routed to and on the token's
    support, so each is computed once: `scores_T[place_T]`.
    """
    first_equal = torch.tensor(_first_equals(batch, ("token_T", "action_mask_T", "expert_TLK")))
    kept_B, rank_B = first_equal.unique(return_inverse=True)
    small = batch.select(kept_B.tolist())
    return small, _starts(small)[rank_B[batch.segment_T]] + batch.position_T


def _first_equals(batch: Batch, names: Sequence[str]) -> list[int]:
    """Return for each segment the first one with equal named fields and supports."""
    columns = [getattr(batch, name) for name in names]
    bounds = _bounds(batch.length_B)
    spans = [(column_T.numpy(), bounds) for column_T in columns if column_T is not None]
    if batch.support is not None:
        count_T = batch.support.count_N
        size_B = torch.zeros_like(batch.length_B).index_add(0, batch.segment_T, count_T)
        spans += [(count_T.numpy(), bounds), (batch.support.token_M.numpy(), _bounds(size_B))]
    first: dict[tuple[bytes, ...], int] = {}
    first_equal: list[int] = []
    for b in range(batch.num_segments):
        key = tuple(array[edges[b] : edges[b + 1]].tobytes() for array, edges in spans)
        first_equal.append(first.setdefault(key, len(first_equal)))
    return first_equal


def _bounds(size_B: Tensor) -> list[int]:
    return [0, *size_B.cumsum(0).tolist()]


def _starts(batch: Batch) -> Tensor:
    length_B = batch.length_B
    return length_B.cumsum(0) - length_B


def _places(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The position and the segment of each token."""
    position_T = torch.cat([torch.arange(length) for length in lengths])
    return position_T, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def _experts(branches: Sequence[Sequence[_Span]]) -> Tensor | None:
    """The experts of each token, [T, L, K]; ValueError if they were recorded for some trajectories only."""
    # The last turn's prompt is all that was before it.
    records = [spans[-1].turn.completion.experts for spans in branches]
    known = [record for record in records if record is not None]
    if not known:
        return None
    if len(known) < len(records):
        raise ValueError(
            f"of {len(records)} trajectories only {len(known)} record which experts their tokens went to; "
            "let every engine record them, or none"
        )
    for record, spans in zip(known, branches, strict=True):
        num_tokens = sum(_length(span.turn) for span in spans)
        if len(record) != num_tokens:
            raise ValueError(
                f"a trajectory has {num_tokens} tokens, and its last completion records the "
                f"experts of {len(record)} tokens"
            )
    return torch.from_numpy(np.concatenate(known))


def _supports(spans: Sequence[_Span]) -> Supports | None:
    known = [one.turn.completion.support for one in spans if one.is_chosen]
    tokens = [support.token_ids for support in known if support is not None]
    if not tokens:
        return None
    counts: list[np.ndarray] = []
    for span in spans:
        completion = span.turn.completion
        counts.append(np.zeros(len(span.turn.observation), dtype=np.int64))
        if completion.support is None or not span.is_chosen:
            counts.append(np.zeros(len(completion.token_ids), dtype=np.int64))
            continue
        # In a batch, 0 would mean sampling over the whole vocabulary.
        if (completion.support.counts == 0).any():
            raise ValueError("the support of a token is empty; it holds at least the token itself")
        counts.append(completion.support.counts)
    return Supports(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(counts)))
