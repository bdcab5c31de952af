"""Packed batches with the advantages and shares that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from millrace.algorithms.weights import token_mean
from millrace.data.batch import Batch
from millrace.data.packing import TokenWeights, pack, pack_demonstrations
from millrace.kernels.token_logprob import Supports
from millrace.types import Completion, Support, Trajectory


def weighed(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], token_weights: TokenWeights = token_mean
) -> Batch:
    """Packed trajectories, with the same advantage for every chosen token of one."""
    batch = pack(trajectories)
    advantage_N = torch.tensor(advantages, dtype=torch.float32)
    batch.advantage_T = advantage_N[batch.segment_T] * batch.action_mask_T
    batch.weight_T = token_weights(batch.action_mask_T, batch.segment_T)
    return batch


def random_tree(seed: int, *, vocab_size: int, num_segments: int = 12, longest: int = 60) -> Batch:
    """Segments that begin as others do: samples of one prompt, whole twins, beginnings of beginnings.

    Any token but a segment's first may be the policy's, with a log-probability and an advantage.
    """
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(num_segments):
        # A third continue the last segment's, which makes groups.
        other = rows[-1 if rng.random() < 0.3 else rng.integers(len(rows))] if rows else []
        shared = rng.integers(len(other) + 1) if rng.random() < 0.8 else 0
        fresh = rng.integers(0 if shared > 1 else 2, max(3, longest - shared))
        rows.append([*other[:shared], *rng.integers(vocab_size, size=fresh).tolist()])
    batch = pack_demonstrations([(row[:1], row[1:]) for row in rows], token_mean)
    mask_T = batch.action_mask_T & torch.from_numpy(rng.random(batch.num_tokens) < 0.6)
    logprob_T, advantage_T = torch.from_numpy(rng.standard_normal((2, batch.num_tokens))).float() * mask_T
    weight_T = token_mean(mask_T, batch.segment_T)
    return replace(
        batch,
        action_mask_T=mask_T,
        sampler_logprob_T=0.3 * logprob_T - 3 * mask_T,
        advantage_T=advantage_T,
        weight_T=weight_T,
    )


def words(support: Supports) -> list[list[int]]:
    """Supports as lists; an empty one is the whole vocabulary."""
    return [part.tolist() for part in support.token_M.split(support.count_N.tolist())]


def drawn_among(
    token_ids: Sequence[int],
    among: Sequence[Sequence[int]] | None,
    *,
    within: Sequence[float] | None = None,
) -> Completion:
    """A completion whose tokens were drawn among these, with these log-probabilities; None: among all."""
    length = len(token_ids)
    logprobs = np.array([-1 - token / 8 for token in token_ids], dtype=np.float32)
    support = None
    if among is not None:
        own = logprobs if within is None else np.array(within, np.float32)
        flat = np.array([token for one in among for token in one], dtype=np.int32)
        counts = np.array([len(one) for one in among], dtype=np.int32)
        support = Support(flat, counts, own)
    versions = np.zeros(length, dtype=np.int32)
    return Completion(tuple(token_ids), logprobs, versions, "stop", "", support=support)


def truncated(batch: Batch, vocab_size: int, seed: int) -> Batch:
    """The same batch, its chosen tokens drawn among 1 to `vocab_size` tokens; every fourth among all."""
    generator = torch.Generator().manual_seed(seed)
    lists = []
    for n, token in enumerate(batch.token_T.tolist()):
        size = 0
        if batch.action_mask_T[n] and n % 4:
            size = int(torch.randint(1, vocab_size + 1, (), generator=generator))
        order = torch.randperm(vocab_size, generator=generator)
        lists.append(torch.cat([torch.tensor([token]), order[order != token]])[:size])
    counts = torch.tensor([len(one) for one in lists])
    return replace(batch, support=Supports(torch.cat(lists).int(), counts))


def outside(support: Supports, vocab_size: int) -> torch.Tensor:
    """Where a token of the vocabulary is outside of a support, [N, V]."""
    rows = [[bool(one) and v not in one for v in range(vocab_size)] for one in words(support)]
    return torch.tensor(rows)
