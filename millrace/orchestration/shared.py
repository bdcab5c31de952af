"""Sampling and scoring shared out over the ranks of a run: each does its part, all get the whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
from safetensors.numpy import load, save

from millrace.orchestration.columns import from_columns, to_columns
from millrace.orchestration.ranks import Ranks, share_of
from millrace.protocols import Engine, NamedTensors, Reward
from millrace.transport.canary import Canary
from millrace.types import Completion, Outcome, Prompt, SamplingParams

_WORDS = "words"


class SharedEngine:
    """An engine on each rank; completions are drawn where their prompt falls, and known everywhere."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
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

    def __init__(self, engine: Engine | None, ranks: Ranks) -> None:
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

    def __init__(self, reward: Reward, ranks: Ranks) -> None:
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
