"""A few tokens that trainer and sampler both judge after each hand-over.

Fingerprints prove which weights a sampler holds, and not that it computes with them: it may hold a copy of
them in another layout, or a graph that was recorded with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Canary:
    """Tokens, and what the trainer says of them.

    Attributes:
        token_ids: at least two.
        logprobs: of each but the first, untempered.
        most: how far a sampler may be from them by rounding alone, in the mean.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    most: float

    def note(self) -> dict[str, Any]:
        """What can be written as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, note: dict[str, Any]) -> Canary:
        """What `note` wrote."""
        return cls(tuple(note["token_ids"]), tuple(note["logprobs"]), note["most"])

    def distance(self, found: Sequence[float]) -> float:
        """Of a sampler's log-probabilities from these, in the mean."""
        return sum(abs(a - b) for a, b in zip(found, self.logprobs, strict=True)) / len(self.logprobs)
