"""Packing of trajectories and demonstrations into batches. Token weights are fixed here, once.

T = packed tokens, N = trajectories, M = tokens of all supports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from millrace.data.batch import Batch
from millrace.kernels.token_logprob import Supports
from millrace.types import Trajectory

TokenWeights = Callable[[Tensor, Tensor], Tensor]


def pack(trajectories: Sequence[Trajectory]) -> Batch:
    """Pack scored trajectories into one row; advantages and token weights are 0 until they are estimated.

    If sampling was truncated, the sampler's log-probabilities become those over the supports. Raises
    ValueError if there are none, one was not scored or failed, one begins with a token of the policy's own,
    a turn without a token has a reward, the support of a token is empty, or experts are known of some
    trajectories only or of other tokens.
    """
    if not trajectories:
        raise ValueError("there are no trajectories to pack")
    tokens: list[Sequence[int]] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    lengths: list[int] = []
    rewards: list[float] = []
    last_actions: list[int] = []  # of each turn
    for trajectory in trajectories:
        if trajectory.outcome is None or trajectory.outcome.kind == "failed":
            raise ValueError("a trajectory without a score cannot be trained on")
        if not trajectory.turns[0].observation:
            raise ValueError("a trajectory begins with a token of the policy; its first observation is empty")
        start = len(mask)
        for turn, reward in zip(trajectory.turns, trajectory.turn_rewards, strict=True):
            given, completion = len(turn.observation), turn.completion
            scored = completion if completion.support is None else completion.support
            tokens += (turn.observation, completion.token_ids)
            mask += [False] * given + [True] * len(completion.token_ids)
            logprobs += [0.0] * given + scored.logprobs.tolist()
            versions += [-1] * given + completion.versions.tolist()
            if completion.token_ids or turn is trajectory.turns[-1]:
                rewards.append(reward)
                last_actions.append(len(mask) - 1)
            elif reward:
                raise ValueError("a turn without a sampled token has a reward; reward the turn before it")
        lengths.append(len(mask) - start)
    position_T, segment_T = _places(lengths)
    reward_T = torch.zeros(len(mask))
    reward_T[torch.tensor(last_actions)] = torch.tensor(rewards)
    return Batch(
        token_T=torch.tensor(list(chain.from_iterable(tokens))),
        position_T=position_T,
        segment_T=segment_T,
        action_mask_T=torch.tensor(mask),
        sampler_logprob_T=torch.tensor(logprobs),
        version_T=torch.tensor(versions),
        reward_T=reward_T,
        advantage_T=torch.zeros(len(mask)),
        weight_T=torch.zeros(len(mask)),
        expert_TLK=_experts(trajectories),
        support=_supports(trajectories),
    )


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
    apart = ("position_T", "segment_T", "weight_T", "support")
    names = [field.name for field in fields(Batch) if field.name not in apart]
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


def _experts(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """The experts of each token, [T, L, K]; ValueError if they were recorded for some trajectories only."""
    # The last turn's prompt is all that was before it.
    records = [trajectory.turns[-1].completion.experts for trajectory in trajectories]
    known = [record for record in records if record is not None]
    if not known:
        return None
    if len(known) < len(records):
        raise ValueError(
            f"of {len(records)} trajectories only {len(known)} record which experts their tokens went to; "
            "let every engine record them, or none"
        )
    for record, trajectory in zip(known, trajectories, strict=True):
        if len(record) != trajectory.num_tokens:
            raise ValueError(
                f"a trajectory has {trajectory.num_tokens} tokens, and its last completion records the "
                f"experts of {len(record)} tokens"
            )
    return torch.from_numpy(np.concatenate(known))


def _supports(trajectories: Sequence[Trajectory]) -> Supports | None:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    tokens = [turn.completion.support.token_ids for turn in turns if turn.completion.support is not None]
    if not tokens:
        return None
    counts: list[np.ndarray] = []
    for turn in turns:
        completion = turn.completion
        counts.append(np.zeros(len(turn.observation), dtype=np.int64))
        if completion.support is None:
            counts.append(np.zeros(len(completion.token_ids), dtype=np.int64))
            continue
        # In a batch, 0 would mean sampling over the whole vocabulary.
        if (completion.support.counts == 0).any():
            raise ValueError("the support of a token is empty; it holds at least the token itself")
        counts.append(completion.support.counts)
    return Supports(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(counts)))
