"""Batches on ranks without engines: what the first rank took, bit for bit, and weights that all gather."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.distributed.ranks import Ranks
from millrace.observability.metrics import Spans
from millrace.rollout.remote import GatherOnly, RemoteBatchSource
from millrace.rollout.sampled_batch import SampledBatch
from millrace.rollout.serialization import from_bytes, pack_batch, to_bytes, unpack_batch
from millrace.run.components import PolicyWeights
from millrace.types import Group
from tests.ranks import run_ranks
from tests.run.pieces import scored

TOLD = {"staleness/mean": 1 / 3, "selection_bias/reward": math.nan}


def batch(num_groups: int = 3) -> SampledBatch:
    groups = scored(*([1 / 3, None, -2.0], [5.0, 0.0], [0.25, 0.5])[:num_groups])
    baselines = [0.1, math.nan, 0.3][:num_groups]
    return SampledBatch(groups, frozenset({num_groups - 1}), baselines, 7, 2)


def plain(groups: list[Group]) -> str:
    """Everything of groups but their arrays' types."""
    return json.dumps([asdict(group) for group in groups], default=np.ndarray.tolist)


def check_same(one: SampledBatch, other: SampledBatch) -> None:
    assert plain(one.groups) == plain(other.groups)
    for ours, theirs in zip(one.groups, other.groups, strict=True):
        for a, b in zip(ours.trajectories, theirs.trajectories, strict=True):
            for turn, same in zip(a.turns, b.turns, strict=True):
                assert turn.completion.logprobs.tobytes() == same.completion.logprobs.tobytes()
                assert turn.completion.versions.dtype == same.completion.versions.dtype
    rest = [repr(replace(sampled, groups=[])) for sampled in (one, other)]
    assert rest[0] == rest[1]


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_batch_comes_back_as_it_was(num_groups: int) -> None:
    given = batch(num_groups)
    prompts = {group.prompt.id: group.prompt for group in given.groups}
    back, told = unpack_batch(*from_bytes(to_bytes(*pack_batch(given, TOLD))), prompts)
    check_same(back, given)
    assert repr(told) == repr(TOLD)
    without = replace(given, baselines=None, left_out=frozenset())
    check_same(unpack_batch(*from_bytes(to_bytes(*pack_batch(without, {}))), prompts)[0], without)


class Trainer:
    """A weight that all ranks must ask for together; `passes` counts how often they did."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.passes = ranks, 0
        self.asked: list[tuple[int, ...]] = []

    def named_tensors(self) -> Any:
        self.passes += 1
        for part in self.ranks.all_gather(b"x"):
            yield part.decode(), torch.zeros(1)

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        self.asked.append(tuple(token_ids))
        return [float(len(part)) for part in self.ranks.all_gather(b"x")][:1]


def updating(trainer: Trainer) -> Callable[[], None]:
    """What `Controller.update_weights` does on a rank without engines."""
    weights = PolicyWeights((1, 2), 0.0)
    weights.activate(cast(Any, trainer))
    return lambda: GatherOnly(weights.canary).update_weights(weights(), 0)


def test_weights_that_were_gathered_to_evaluate_are_not_gathered_again() -> None:
    trainer = Trainer(Ranks())
    follower = RemoteBatchSource([], updating(trainer), ranks=Ranks(), spans=Spans(), version=4)
    for version, passes in ((4, 0), (5, 1), (5, 1), (6, 2)):
        follower.begin(None, version) if version == 4 else follower.update_weights(version)
        assert trainer.passes == passes
        assert trainer.asked == [(1, 2)] * passes


def on_ranks(rank: int) -> dict[str, Tensor]:
    ranks, newest = Ranks(rank, 2), PolicyWeights((1, 2), 0.0)
    trainer: Any = Trainer(ranks)
    newest.activate(trainer)
    if ranks.first:
        # What its source does: threads and weights, then batch, weights, batch, and a step left out.
        assert ranks.threads() == [torch.get_num_threads()] * 2
        list(newest())
        assert newest.canary().logprobs == (1.0,)
        sent = to_bytes(*pack_batch(batch(), TOLD))
        assert ranks.broadcast(sent) == sent
        list(newest())
        assert newest.canary().logprobs == (1.0,)
        ranks.broadcast(to_bytes(*pack_batch(batch(1), {})))
    else:
        spans = Spans()
        prompts = [group.prompt for group in batch().groups]
        with RemoteBatchSource(prompts, updating(trainer), ranks=ranks, spans=spans) as source:
            source.begin(None, 4)
            sampled, told = source.next_batch()
            check_same(sampled, batch())
            assert repr(told) == repr(TOLD)
            source.update_weights(5)
            check_same(source.next_batch()[0], batch(1))
            source.update_weights(5)
        assert sorted(spans.take()) == ["sample"]
    ranks.barrier()
    return {"passes": torch.tensor(trainer.passes)}


@pytest.mark.world
def test_it_meets_the_first_rank_at_each_batch_and_whenever_weights_changed() -> None:
    assert [told["passes"].item() for told in run_ranks(2, on_ranks)] == [2, 2]
