"""Where a prompt is computed: by a prefill worker, or by the worker that generates its tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RouteKind = Literal["adaptive", "apart", "collocated"]


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """Which prompts a prefill worker computes.

    Attributes:
        kind: `apart` all of them, `collocated` none, `adaptive` those of more than `apart_above` tokens.
        apart_above: see `kind`.
    """

    kind: RouteKind
    apart_above: int

    def is_apart(self, num_tokens: int, block_size: int) -> bool:
        """Whether a prompt is to be computed apart; one without a whole block to send never is."""
        if self.kind == "collocated" or num_tokens <= block_size:
            return False
        return self.kind == "apart" or num_tokens > self.apart_above
