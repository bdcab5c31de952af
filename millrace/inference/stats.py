"""What an engine says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds and has done.

    Attributes:
        num_running: requests that have a row.
        num_waiting: requests that have none yet.
        kv_usage: share of the pool's blocks that running requests hold, in [0, 1].
        prefix_queries: prompt tokens looked up in the prefix cache so far.
        prefix_hits: those of them that were found there.
        num_preemptions: times a running request gave its blocks back.
        prompt_tokens: of all requests so far.
        generation_tokens: drawn so far.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
