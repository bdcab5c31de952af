"""Settings of the engine: what it may hold, and where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from millrace.config.section import Section


class EngineConfig(Section):
    """What draws completions."""

    @model_validator(mode="before")
    @classmethod
    def _without_name(cls, given: Any) -> Any:
        """Older run folders hold `name: paged`; there is no other engine now."""
        if isinstance(given, dict) and given.get("name") == "paged":
            return {key: value for key, value in given.items() if key != "name"}
        return given

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
    processes: NonNegativeInt | None = Field(
        None,
        description="engines in processes of their own, which draw while the trainer trains; 0 draws in the "
        "trainer's; null is 1 with flow.staleness above 0, else 0",
    )
    delta: bool = Field(
        False,
        description="send engines on Ray only what changed since the version that they hold, bit for bit; it "
        "saves most with policies in bfloat16 and small learning rates",
    )
    take_turns: bool = Field(
        False,
        description="trainer and engine share the device's memory in turns: what the trainer holds waits in "
        "the host's memory while the engine samples (on a CPU in a file of the run folder)",
    )


def idle_engine(engine: EngineConfig) -> Iterator[str]:
    """One sentence for each setting that was given and can have no effect."""
    if engine.cache_tokens is not None and engine.cache_tokens < engine.block_size:
        yield (
            f"engine.cache_tokens {engine.cache_tokens} is less than one block of engine.block_size "
            f"{engine.block_size}; raise it"
        )
