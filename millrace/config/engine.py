"""Settings of the sampler: which engine draws, and what it may hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from millrace.config.section import Section


class EngineConfig(Section):
    """What draws completions."""

    name: Literal["paged", "reference"] = Field(
        "paged",
        description="paged: continuous batching over a paged cache; reference: its slow twin, a dense cache",
    )
    cache_tokens: PositiveInt | None = Field(
        None,
        description="tokens whose keys and values are kept; null takes what max_requests of the longest "
        "sequences need, at most a quarter of the free memory",
    )
    max_requests: PositiveInt = Field(1024, description="completions drawn at once; the others wait")
    tokens_per_step: PositiveInt = Field(
        8192, description="tokens of one forward; a longer prompt takes several"
    )
    cuda_graphs: bool = Field(
        False, description="replay decode steps as CUDA graphs (written for CUDA, not yet measured on a GPU)"
    )
    block_size: PositiveInt = Field(16, description="tokens of a block of the paged cache")


def idle_engine(engine: EngineConfig) -> Iterator[str]:
    """One sentence for each setting that was given and can have no effect."""
    if engine.name == "reference":
        for name in ("max_requests", "block_size", "cuda_graphs"):
            if name in engine.model_fields_set:
                yield f"engine.{name} has no effect with engine.name reference; remove it"
    if engine.cache_tokens is not None and engine.cache_tokens < engine.block_size:
        yield (
            f"engine.cache_tokens {engine.cache_tokens} is less than one block of engine.block_size "
            f"{engine.block_size}; raise it"
        )
