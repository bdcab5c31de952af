"""Data-parallel generation and scoring: scatter by rank, all-gather the results.

If only rank 0 has engines, in worker processes, it keeps the event log and broadcasts each batch. Collectives
run only in the trainers' threads, as the same calls in the same order on every rank.
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
from millrace.rollout.policy_weights import PolicyWeights
from millrace.rollout.sampled_batch import SampledBatch
from millrace.rollout.serialization import from_columns, pack_groups, to_columns, unpack_groups
from millrace.transport.canary import Canary
from millrace.types import Completion, Outcome, Prompt, SamplingParams

_FIELDS = "fields"


class SharedEngine:
    """Data-parallel generation with one engine per rank: scatter the prompts, all-gather the completions."""

    def __init__(self, engine: Engine, ranks: RankGroup) -> None:
        """Wrap this rank's engine.

        Args:
            engine: of this rank.
            ranks: of the run.
        """
        self._engine, self._ranks = engine, ranks

    @property
    def version(self) -> int:
        """Version of the weights that generate from now on."""
        return self._engine.version

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Generate one completion for each prompt, in order; see `protocols.Engine`."""
        mine = rank_slice(len(prompts), self._ranks.rank, self._ranks.size)
        completions = self._engine.generate(prompts[mine], params[mine]) if mine.start < mine.stop else []
        return [
            completion
            for shard in self._ranks.gather(pack_completions(completions))
            for completion in unpack_completions(shard)
        ]


class GatherOnly:
    """A `protocols.WeightTransport` for ranks that only join the all-gather; rank 0 sends the weights."""

    def __init__(self, canary: Callable[[], Canary]) -> None:
        """Join the canary computation as well.

        Args:
            canary: this rank's call of that collective.
        """
        self._canary = canary
        self.metrics: dict[str, float] = {}

    def send(self, named_tensors: NamedTensors, version: int) -> None:
        """Iterate over every tensor for its collectives, and keep none."""
        for _ in named_tensors:
            pass
        self._canary()


class FirstEngine:
    """Rank 0's engine, which generates for all ranks; every call is a collective."""

    def __init__(self, engine: Engine | None, ranks: RankGroup) -> None:
        """Wrap rank 0's engine.

        Args:
            engine: on rank 0; None on the others.
            ranks: of the run.
        """
        self._engine, self._ranks = engine, ranks

    @property
    def version(self) -> int:
        """Version of the weights that generate from now on."""
        return int(self._ranks.share("" if self._engine is None else str(self._engine.version)))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Generate one completion for each prompt, in order; see `protocols.Engine`."""
        if self._engine is None:
            return unpack_completions(self._ranks.hand_out())
        completions = self._engine.generate(prompts, params)
        self._ranks.hand_out(pack_completions(completions))
        return completions


class SharedReward:
    """Data-parallel scoring with one reward per rank: scatter the answers, all-gather the outcomes."""

    def __init__(self, reward: Reward, ranks: RankGroup) -> None:
        """Wrap this rank's reward.

        Args:
            reward: of this rank.
            ranks: of the run.
        """
        self._reward, self._ranks = reward, ranks

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """Score each completion, in order; see `protocols.Reward`."""
        mine = rank_slice(len(prompts), self._ranks.rank, self._ranks.size)
        outcomes = self._reward.score(prompts[mine], completions[mine]) if mine.start < mine.stop else []
        packed = json.dumps([asdict(outcome) for outcome in outcomes]).encode()
        return [Outcome(**outcome) for shard in self._ranks.gather(packed) for outcome in json.loads(shard)]

    def close(self) -> None:
        """Release the resources of this rank's reward."""
        self._reward.close()


def pack_completions(completions: Sequence[Completion]) -> bytes:
    """Serialize completions to bytes: arrays as safetensors, with the JSON fields inside."""
    return _to_bytes(*to_columns(completions))


def unpack_completions(data: bytes) -> list[Completion]:
    """Deserialize the completions of `pack_completions`."""
    return from_columns(*_from_bytes(data))


class RemoteBatchSource:
    """The `BatchSource` of the ranks other than 0; each call is a collective with rank 0's."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        policy_weights: PolicyWeights,
        *,
        ranks: RankGroup,
        spans: Spans,
        version: int | None = None,
    ) -> None:
        """Create the source; `begin` starts it.

        Args:
            prompts: to train on.
            policy_weights: this rank's shard of the weights.
            ranks: of the run.
            spans: of the trainer's thread.
            version: of the weights already gathered for evaluation; None if there are none.
        """
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._policy_weights, self._ranks, self._spans = policy_weights, ranks, spans
        self._version = version

    def begin(self, checkpoint: Path | None, version: int) -> None:
        """Join the all-gather of the initial weights; only rank 0 restores the staleness controller."""
        self._ranks.threads()
        self.update_weights(version)

    def __enter__(self) -> RemoteBatchSource:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Release nothing."""

    def next_batch(self) -> tuple[SampledBatch, dict[str, float]]:
        """Wait for rank 0's batch and its metrics."""
        with self._spans("sample"):
            return unpack_batch(self._ranks.hand_out(), self._prompts)

    def update_weights(self, version: int) -> None:
        """Join the all-gather of the weights, unless the step was skipped."""
        if version != self._version:
            self._version = version
            with self._spans("weight_sync"):
                GatherOnly(self._policy_weights.canary).send(self._policy_weights(), version)

    def save(self, folder: Path) -> None:
        """Write nothing: rank 0 writes the rollout state."""

    def warnings(self) -> list[str]:
        """Return no warnings: rank 0 reports them for all."""
        return []


def pack_batch(sampled: SampledBatch, metrics: Mapping[str, float]) -> bytes:
    """Serialize a batch and its metrics to bytes: arrays as safetensors, with the JSON fields inside."""
    groups, columns = pack_groups(dict(enumerate(sampled.groups)))
    fields = {
        "groups": groups,
        "metrics": dict(metrics),
        "left_out": sorted(sampled.left_out),
        "baselines": sampled.baselines,
        "num_greedy_tokens": sampled.num_greedy_tokens,
        "num_rounds": sampled.num_rounds,
    }
    return _to_bytes(fields, columns)


def unpack_batch(data: bytes, prompts: Mapping[str, Prompt]) -> tuple[SampledBatch, dict[str, float]]:
    """Deserialize the batch of `pack_batch`; `prompts` by id."""
    fields, columns = _from_bytes(data)
    groups, metrics = fields.pop("groups"), fields.pop("metrics")
    unpacked = list(unpack_groups(groups, columns, prompts).values())
    left_out = frozenset(fields.pop("left_out"))
    return SampledBatch(unpacked, left_out, **fields), metrics


def rank_slice(count: int, rank: int, size: int) -> slice:
    """Return a rank's contiguous slice of `count` items; the slices of all ranks partition the items."""
    return slice(count * rank // size, count * (rank + 1) // size)


def _to_bytes(fields: Any, columns: Mapping[str, np.ndarray]) -> bytes:
    """Serialize JSON fields and arrays to one safetensors file."""
    packed: bytes = save({**columns, _FIELDS: np.frombuffer(json.dumps(fields).encode(), np.uint8)})
    return packed


def _from_bytes(data: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """Deserialize what `_to_bytes` serialized."""
    columns = load(data)
    return json.loads(columns.pop(_FIELDS).tobytes()), columns
