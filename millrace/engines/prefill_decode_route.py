"""Where a prompt is computed: by a prefill worker, or by the worker that generates its tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millrace.planner.placement import Link, Objective

RouteKind = Literal["adaptive", "apart", "collocated"]


# Export and import of blocks between two workers, as benchmarks/kv_transfer.py measured them.
SHARED_MEMORY = Link(latency_s=2e-3, bytes_per_s=0.15e9)


@dataclass(frozen=True, slots=True)
class CostRoute:
    """Placement by the cost model of this file, for an objective, or for the end of all requests if None."""

    file: Path
    objective: Objective | None


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """Which prompts a prefill worker computes.

    Attributes:
        kind: `apart` all of them, `collocated` none, `adaptive` those of more than `apart_above` tokens, or
            those for which the cost model predicts that it is better.
        apart_above: see `kind`.
        cost: the cost model of `adaptive`, if it has one; then any worker may do either part.
    """

    kind: RouteKind
    apart_above: int
    cost: CostRoute | None = None

    def is_apart(self, num_tokens: int, block_size: int) -> bool:
        """Whether a prompt is to be computed apart; one without a whole block to send never is."""
        if self.kind == "collocated" or num_tokens <= block_size:
            return False
        return self.kind == "apart" or num_tokens > self.apart_above
