"""Data-parallel generation and scoring: scatter by rank, all-gather the results.

If only rank 0 has engines, in worker processes, it keeps the event log and broadcasts each batch. Collectives
run only in the trainers' threads, as the same calls in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from millrace.data.streamed_prompts import by_id
from millrace.observability.metrics import Spans
from millrace.protocols import Engine, EpisodeReward, NamedTensors, RankGroup
from millrace.rollout.sampled_batch import SampledBatch
from millrace.rollout.serialization import (
    from_bytes,
    pack_completions,
    to_bytes,
    unpack_batch,
    unpack_completions,
)
from millrace.transport.canary import Canary
from millrace.types import Completion, Episode, Outcome, Prompt, SamplingParams


class SharedEngine:
    """Data-parallel generation: scatter the prompts over the engines, all-gather the completions.

    Each rank has an engine, or `ranks_per_engine` neighbouring ones share one by tensor parallelism: they get
    the same prompts, and the first of them returns the completions.
    """

    def __init__(self, engine: Engine, ranks: RankGroup, *, ranks_per_engine: int = 1) -> None:
        """Wrap this rank's engine.

        Args:
            engine: of this rank, or its part of one.
            ranks: of the run.
            ranks_per_engine: ranks of one engine, a divisor of the run's.
        """
        self._engine, self._ranks = engine, ranks
        self._number, self._place = divmod(ranks.rank, ranks_per_engine)
        self._num_engines = ranks.size // ranks_per_engine

    @property
    def version(self) -> int:
        """Version of the weights that generate from now on."""
        return self._engine.version

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Generate one completion for each prompt, in order; see `protocols.Engine`."""
        mine = rank_slice(len(prompts), self._number, self._num_engines)
        completions = self._engine.generate(prompts[mine], params[mine]) if mine.start < mine.stop else []
        shown = [] if self._place else completions
        return [
            completion
            for shard in self._ranks.all_gather(to_bytes(*pack_completions(shown)))
            for completion in unpack_completions(*from_bytes(shard))
        ]


class GatherOnly:
    """A `protocols.WeightTransport` for ranks that only join the all-gather; rank 0 updates the engines."""

    def __init__(self, canary: Callable[[], Canary]) -> None:
        """Join the canary computation as well.

        Args:
            canary: this rank's call of that collective.
        """
        self._canary = canary
        self.metrics: dict[str, float] = {}

    def update_weights(self, tensors: NamedTensors, policy_version: int) -> None:
        """Iterate over every tensor for its collectives, and keep none."""
        for _ in tensors:
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
        return int(self._ranks.broadcast_text("" if self._engine is None else str(self._engine.version)))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Generate one completion for each prompt, in order; see `protocols.Engine`."""
        if self._engine is None:
            return unpack_completions(*from_bytes(self._ranks.broadcast()))
        completions = self._engine.generate(prompts, params)
        self._ranks.broadcast(to_bytes(*pack_completions(completions)))
        return completions


class SharedReward:
    """Data-parallel scoring with one reward per rank: scatter the answers, all-gather the outcomes."""

    def __init__(self, reward: EpisodeReward, ranks: RankGroup) -> None:
        """Wrap this rank's reward.

        Args:
            reward: of this rank.
            ranks: of the run.
        """
        self._reward, self._ranks = reward, ranks

    @property
    def sees_episodes(self) -> bool:
        """Whether the reward needs the episodes."""
        return self._reward.sees_episodes

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """Score each completion, in order; see `protocols.EpisodeReward`."""
        mine = rank_slice(len(prompts), self._ranks.rank, self._ranks.size)
        outcomes = []
        if mine.start < mine.stop:
            outcomes = self._reward.score(prompts[mine], completions[mine], episodes[mine])
        packed = to_bytes({"outcomes": [asdict(outcome) for outcome in outcomes]}, {})
        shards = [from_bytes(shard)[0] for shard in self._ranks.all_gather(packed)]
        return [Outcome(**outcome) for fields in shards for outcome in fields["outcomes"]]

    def close(self) -> None:
        """Release the resources of this rank's reward."""
        self._reward.close()


class RemoteBatchSource:
    """The `BatchSource` of the ranks other than 0; each call is a collective with rank 0's."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        update_weights: Callable[[], None],
        *,
        ranks: RankGroup,
        spans: Spans,
        version: int | None = None,
    ) -> None:
        """Create the source; `begin` starts it.

        Args:
            prompts: to train on.
            update_weights: joins the all-gather of the trainer's weights.
            ranks: of the run.
            spans: of the trainer's thread.
            version: of the weights already gathered for evaluation; None if there are none.
        """
        self._prompts = by_id(prompts)
        self._update_weights, self._ranks, self._spans = update_weights, ranks, spans
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
            return unpack_batch(*from_bytes(self._ranks.broadcast()), self._prompts)

    def update_weights(self, version: int) -> None:
        """Join the all-gather of the weights, unless the step was skipped."""
        if version != self._version:
            self._version = version
            self._update_weights()

    def save(self, folder: Path) -> None:
        """Write nothing: rank 0 writes the rollout state."""

    def warnings(self) -> list[str]:
        """Return no warnings: rank 0 reports them for all."""
        return []


def rank_slice(count: int, rank: int, size: int) -> slice:
    """Return a rank's contiguous slice of `count` items; the slices of all ranks partition the items."""
    return slice(count * rank // size, count * (rank + 1) // size)
