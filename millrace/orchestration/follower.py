"""Batches on ranks beside the first, which alone has engines in processes of their own.

Its `Source` starts groups, hears of engines and keeps the log; what it hands out here is all that training
reads of a batch. Ranks meet in their trainers' own threads alone, at the same calls in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from millrace.observability.metrics import Spans
from millrace.orchestration.finished import pack_groups, unpack_groups
from millrace.orchestration.parts import Newest
from millrace.orchestration.ranks import Ranks
from millrace.orchestration.shared import Onlooker
from millrace.orchestration.step import Sampled
from millrace.types import Prompt

_WORDS = "words"


class Follower:
    """A `Source` as the other ranks have it; each of its calls meets the first rank's.

    Use it as a context manager, as that one.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        newest: Newest,
        *,
        ranks: Ranks,
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
