"""The interface between the training loop and the rollouts."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from millrace.rollout.sampled_batch import SampledBatch


class BatchSource(Protocol):
    """Batches for the trainer of one rank; all ranks make the same calls in the same order.

    Use it as a context manager; sampling runs only inside.
    """

    def __enter__(self) -> Self:
        """Return itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop sampling."""
        ...

    def begin(self, checkpoint: Path | None, version: int) -> None:
        """Send the weights to the engines and start the first groups, or resume those of a checkpoint.

        Args:
            checkpoint: to resume from; None, or a checkpoint without rollouts, starts anew.
            version: of the weights.
        """
        ...

    def next_batch(self) -> tuple[SampledBatch, dict[str, float]]:
        """Wait for the next batch; return it with its metrics."""
        ...

    def update_weights(self, version: int) -> None:
        """Start a weight update of every engine; at staleness 0, wait until all have verified it."""
        ...

    def save(self, folder: Path) -> None:
        """Write the rollout state into a new checkpoint; called on rank 0 only."""
        ...

    def warnings(self) -> list[str]:
        """Return warnings for the user, each once."""
        ...
