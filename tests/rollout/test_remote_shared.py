from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.distributed.ranks import Ranks
from millrace.rollout.remote import (
    FirstEngine,
    GatherOnly,
    SharedEngine,
    SharedReward,
    rank_slice,
)
from millrace.rollout.serialization import from_bytes, pack_completions, to_bytes, unpack_completions
from millrace.types import Completion, Episode, Outcome, Prompt, SamplingParams, Support, TopTokens
from tests.ranks import run_ranks

ARRAYS = ("logprobs", "versions", "prompt_logprobs", "experts")


def completion(seed: int) -> Completion:
    draw = np.random.default_rng(seed)
    count = seed % 4
    support = None
    if seed % 3 == 1:
        counts = draw.integers(1, 5, count).astype(np.int32)
        tokens = draw.integers(0, 9, counts.sum()).astype(np.int32)
        support = Support(tokens, counts, draw.normal(size=count).astype(np.float32))
    return Completion(
        token_ids=tuple(draw.integers(0, 99, count).tolist()),
        logprobs=draw.normal(size=count).astype(np.float32),
        versions=draw.integers(0, 9, count).astype(np.int32),
        finish_reason=("stop", "length", "abort", "error")[seed % 4],
        text=f"é{seed}\n",
        support=support,
        prompt_logprobs=draw.normal(size=seed % 5).astype(np.float32) if seed % 2 else None,
        prompt_top=TopTokens(np.arange(seed % 5, dtype=np.int32), -np.arange(seed % 5, dtype=np.float32))
        if seed % 4 == 1
        else None,
        experts=draw.integers(-1, 9, (count + 2, 3, 2)).astype(np.int16) if seed % 3 else None,
        reason="why" * (seed % 2),
    )


def check_same(one: Completion, other: Completion) -> None:
    for name in ("token_ids", "finish_reason", "text", "reason"):
        assert getattr(one, name) == getattr(other, name)
    pairs = [(getattr(one, name), getattr(other, name)) for name in ARRAYS]
    assert (one.support is None) == (other.support is None)
    if one.support is not None and other.support is not None:
        names = ("token_ids", "counts", "logprobs")
        pairs += [(getattr(one.support, name), getattr(other.support, name)) for name in names]
    assert (one.prompt_top is None) == (other.prompt_top is None)
    if one.prompt_top is not None and other.prompt_top is not None:
        pairs += [
            (one.prompt_top.token_ids, other.prompt_top.token_ids),
            (one.prompt_top.logprobs, other.prompt_top.logprobs),
        ]
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)


@pytest.mark.parametrize("seeds", [range(0), range(1), range(24)])
def test_completions_come_back_as_they_were(seeds: range) -> None:
    given = [completion(seed) for seed in seeds]
    back = unpack_completions(*from_bytes(to_bytes(*pack_completions(given))))
    assert len(back) == len(given)
    for one, other in zip(given, back, strict=True):
        check_same(one, other)


@pytest.mark.parametrize("count", [0, 1, 5, 12])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_one_falls_to_one_rank(count: int, size: int) -> None:
    things = list(range(count))
    parts = [things[rank_slice(count, rank, size)] for rank in range(size)]
    assert sum(parts, []) == things
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


class Counter:
    """Draws a prompt's own number, and judges it by the rank."""

    version = 3

    def __init__(self, rank: int) -> None:
        self.rank, self.asked, self.scored = rank, 0, 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        self.asked += len(prompts)
        return [completion(prompt[0]) for prompt in prompts]

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode]
    ) -> list[Outcome]:
        assert [episode.end for episode in episodes] == [str(len(text)) for text in completions]
        self.scored += len(prompts)
        outcomes = [Outcome("score", len(text) / 3, parts={"rank": self.rank}) for text in completions]
        return [
            Outcome.failure("gone") if prompt.id == "4" else o
            for prompt, o in zip(prompts, outcomes, strict=True)
        ]

    def close(self) -> None:
        self.version = -1


def on_ranks(rank: int) -> dict[str, Tensor]:
    ranks, counter = Ranks(rank, 3), Counter(rank)
    assert ranks.first == (rank == 0)
    assert ranks.all_gather(b"x" * rank) == [b"", b"x", b"xx"]
    assert ranks.broadcast_text(f"said by {rank}") == "said by 0"
    assert [ranks.any_rank(rank == 2), ranks.any_rank(False)] == [True, False]
    engine, reward = SharedEngine(counter, ranks), SharedReward(counter, ranks)
    assert engine.version == 3
    drawn = engine.generate([(n,) for n in range(8)], [SamplingParams()] * 8)
    for n, one in enumerate(drawn):
        check_same(one, completion(n))
    prompts = [Prompt(str(n), (n,), "") for n in range(8)]
    outcomes = reward.score(prompts, ["a" * n for n in range(8)], [Episode((), str(n)) for n in range(8)])
    assert [outcome.kind for outcome in outcomes] == ["score"] * 4 + ["failed"] + ["score"] * 3
    assert math.isnan(outcomes[4].value) and outcomes[4].reason == "gone"
    assert [o.value for o in outcomes[:4]] == [0, 1 / 3, 2 / 3, 1]
    judges = [outcome.parts["rank"] for outcome in outcomes if outcome.parts]
    assert engine.generate([(1,)], [SamplingParams()])[0].text == "é1\n"
    counter.version = 7 + rank
    assert engine.version == 7 + rank
    check_first(ranks, counter)
    reward.close()
    assert counter.version == engine.version == -1
    ranks.barrier()
    return {"asked": torch.tensor([counter.asked, counter.scored]), "judges": torch.tensor(judges)}


def check_first(ranks: Ranks, counter: Counter) -> None:
    """An engine of the first rank alone, whose weights all gather."""
    assert ranks.broadcast(b"first" if ranks.first else b"") == b"first"
    assert ranks.broadcast() == b""
    before = counter.asked
    engine = FirstEngine(counter if ranks.first else None, ranks)
    drawn = engine.generate([(n,) for n in range(5)], [SamplingParams()] * 5)
    assert counter.asked == before + (5 if ranks.first else 0)
    for n, one in enumerate(drawn):
        check_same(one, completion(n))
    # Every rank draws with the first one's.
    assert engine.version == 7
    seen: list[str] = []

    def named_tensors() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b"):
            seen.append(name)
            yield name, torch.zeros(1)

    GatherOnly(lambda: seen.append("canary")).update_weights(named_tensors(), 9)
    assert seen == ["a", "b", "canary"]


@pytest.mark.world
def test_each_rank_does_its_part_and_all_get_the_whole() -> None:
    told = run_ranks(3, on_ranks)
    assert [one["asked"].tolist() for one in told] == [[7, 2], [3, 3], [4, 3]]
    assert all(one["judges"].tolist() == [0, 0, 1, 1, 2, 2, 2] for one in told)


def test_one_process_waits_for_nobody() -> None:
    ranks = Ranks()
    assert (ranks.first, ranks.all_gather(b"a"), ranks.broadcast_text("b"), ranks.any_rank(True)) == (
        True,
        [b"a"],
        "b",
        True,
    )
