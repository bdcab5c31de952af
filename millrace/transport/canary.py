"""A few tokens whose log-probabilities trainer and sampler compare after each weight update.

Fingerprints verify which weights a sampler holds, but not that it computes with them: it may use a stale copy
in another layout, or a CUDA graph that was captured with other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Canary:
    """Tokens (at least 2) and the trainer's log-probability of each but the first, at temperature 1.

    `most` is the largest mean absolute difference of a sampler that rounding can explain.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    most: float

    def fields(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Canary:
        """Convert back from the result of `fields`."""
        return cls(tuple(fields["token_ids"]), tuple(fields["logprobs"]), fields["most"])

    def distance(self, found: Sequence[float]) -> float:
        """Return the mean absolute difference from a sampler's log-probabilities."""
        return sum(abs(a - b) for a, b in zip(found, self.logprobs, strict=True)) / len(self.logprobs)
