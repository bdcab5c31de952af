"""Sizes of an engine, which its simulation has too. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Blocks of the KV pool, their tokens and bytes, and what a step and a request may have at most."""

    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_requests: int
    max_length: int
    block_bytes: int = 0
