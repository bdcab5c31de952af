"""Ranks share sampling and scoring: each does its part and all get the whole.

Where rank 0 alone has engines in processes of their own, it keeps the event log and hands out all that
training reads of a batch. Ranks meet in their trainers' own threads alone, at the same calls in the same
order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from millrace.observability.metrics import Spans
from millrace.protocols import Engine, NamedTensors, RankGroup, Reward
from millrace.rollout.policy_weights import Newest
from millrace.rollout.sampling import Sampled
from millrace.rollout.serialization import from_columns, pack_groups, to_columns, unpack_groups
from millrace.transport.canary import Canary
from millrace.types import Completion, Outcome, Prompt, SamplingParams

_WORDS = "words"


class SharedEngine:
    """An engine on each rank; completions are drawn where their prompt falls, and known everywhere."""

    def __init__(self, engine: Engine, ranks: RankGroup) -> None:
        """The ranks' engines, through this rank's own.

        Args:
            engine: this rank's.
            ranks: of the run.
        """
        self._engine, self._ranks = engine, ranks

    @property
    def version(self) -> int:
        """Of the weights that draw from now on."""
        return self._engine.version

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Draw one completion for each prompt, in order; see `protocols.Engine`."""
        mine = share_of(len(prompts), self._ranks.rank, self._ranks.size)
        drawn = self._engine.generate(prompts[mine], params[mine]) if mine.start < mine.stop else []
        return [
            completion
            for part in self._ranks.gather(pack_completions(drawn))
            for completion in unpack_completions(part)
        ]


class Onlooker:
    """Takes part where ranks gather weights that the first alone hands on; a `protocols.WeightTransport`."""

    def __init__(self, canary: Callable[[], Canary]) -> None:
        """One that helps to judge the canary as well.

        Args:
            canary: this rank's part of it.
        """
        self._canary = canary
        self.metrics: dict[str, float] = {}

    def send(self, named_tensors: NamedTensors, version: int) -> None:
        """See every tensor, one at a time, and keep none."""
        for _ in named_tensors:
            pass
        self._canary()


class FirstEngine:
    """The first rank's engine, which draws for all; every call is one of all ranks, in step."""

    def __init__(self, engine: Engine | None, ranks: RankGroup) -> None:
        """The one engine, as a rank sees it.

        Args:
            engine: the first rank's own; None on the others.
            ranks: of the run.
        """
        self._engine, self._ranks = engine, ranks

    @property
    def version(self) -> int:
        """Of the weights that draw from now on."""
        return int(self._ranks.share("" if self._engine is None else str(self._engine.version)))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Draw one completion for each prompt, in order; see `protocols.Engine`."""
        if self._engine is None:
            return unpack_completions(self._ranks.hand_out())
        drawn = self._engine.generate(prompts, params)
        self._ranks.hand_out(pack_completions(drawn))
        return drawn


class SharedReward:
    """A reward on each rank; answers are judged where they fall, and the outcomes known everywhere."""

    def __init__(self, reward: Reward, ranks: RankGroup) -> None:
        """The ranks' rewards, through this rank's own.

        Args:
            reward: this rank's.
            ranks: of the run.
        """
        self._reward, self._ranks = reward, ranks

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """One outcome for each completion, in order; see `protocols.Reward`."""
        mine = share_of(len(prompts), self._ranks.rank, self._ranks.size)
        outcomes = self._reward.score(prompts[mine], completions[mine]) if mine.start < mine.stop else []
        told = json.dumps([asdict(outcome) for outcome in outcomes]).encode()
        return [Outcome(**outcome) for part in self._ranks.gather(told) for outcome in json.loads(part)]

    def close(self) -> None:
        """Give back what this rank's reward holds."""
        self._reward.close()


def pack_completions(completions: Sequence[Completion]) -> bytes:
    """Completions as bytes: numbers as safetensors, words as JSON in it."""
    words, columns = to_columns(completions)
    packed: bytes = save({**columns, _WORDS: np.frombuffer(json.dumps(words).encode(), np.uint8)})
    return packed


def unpack_completions(data: bytes) -> list[Completion]:
    """What `pack_completions` packed."""
    columns = load(data)
    words = json.loads(columns.pop(_WORDS).tobytes())
    return from_columns(words, columns)


class Follower:
    """A `Source` as the other ranks have it; each of its calls meets the first rank's.

    Use it as a context manager, as that one.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        newest: Newest,
        *,
        ranks: RankGroup,
        spans: Spans,
        version: int | None = None,
    ) -> None:
        """Nothing has begun.

        Args:
            prompts: to train on.
            newest: this rank's part of the weights.
            ranks: of the run.
            spans: of the trainer's thread.
            version: of the weights that were gathered before, to evaluate; None if none were.
        """
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._newest, self._ranks, self._spans = newest, ranks, spans
        self._version = version

    def begin(self, checkpoint: Path | None, version: int) -> None:
        """Help to gather the weights that engines begin with; the first rank knows where the flow goes on."""
        self._ranks.threads()
        self.published(version)

    def __enter__(self) -> Follower:
        """Follow within the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def next_batch(self) -> tuple[Sampled, dict[str, float]]:
        """Wait for the first rank's batch and what is to be recorded of it."""
        with self._spans("sample"):
            return unpack_batch(self._ranks.hand_out(), self._prompts)

    def published(self, version: int) -> None:
        """Help to gather the weights, if the step that was to change them was not left out."""
        if version != self._version:
            self._version = version
            with self._spans("sync"):
                Onlooker(self._newest.canary).send(self._newest(), version)

    def warnings(self) -> list[str]:
        """None: the first rank speaks for all."""
        return []


def pack_batch(sampled: Sampled, told: Mapping[str, float]) -> bytes:
    """A batch and what is recorded of it: numbers as safetensors, words as JSON in it."""
    groups, columns = pack_groups(dict(enumerate(sampled.groups)))
    words: dict[str, Any] = {
        "groups": groups,
        "told": dict(told),
        "left_out": sorted(sampled.left_out),
        "baselines": sampled.baselines,
        "num_greedy_tokens": sampled.num_greedy_tokens,
        "num_rounds": sampled.num_rounds,
    }
    packed: bytes = save({**columns, _WORDS: np.frombuffer(json.dumps(words).encode(), np.uint8)})
    return packed


def unpack_batch(data: bytes, prompts: Mapping[str, Prompt]) -> tuple[Sampled, dict[str, float]]:
    """What `pack_batch` packed; `prompts` by id."""
    columns = load(data)
    words = json.loads(columns.pop(_WORDS).tobytes())
    groups, told = words.pop("groups"), words.pop("told")
    unpacked = list(unpack_groups(groups, columns, prompts).values())
    left_out = frozenset(words.pop("left_out"))
    return Sampled(unpacked, left_out, **words), told


def share_of(count: int, rank: int, size: int) -> slice:
    """Neighbouring ones out of `count` that fall to a rank; all ranks together have all of them."""
    return slice(count * rank // size, count * (rank + 1) // size)
