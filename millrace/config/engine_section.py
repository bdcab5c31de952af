"""Settings of the engine: its memory, its batches, and where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from millrace.config.section import Section


class EngineConfig(Section):
    """What generates completions."""

    @model_validator(mode="before")
    @classmethod
    def _without_name(cls, given: Any) -> Any:
        """Older run folders hold `name: paged`; there is no other engine now."""
        if isinstance(given, dict) and given.get("name") == "paged":
            return {key: value for key, value in given.items() if key != "name"}
        return given

    cache_tokens: PositiveInt | None = Field(
        None,
        description="tokens that the KV cache holds; null is enough for max_num_seqs of the longest "
        "sequences, at most a quarter of the free memory",
    )
    max_num_seqs: PositiveInt = Field(
        1024, description="completions generated at the same time; others wait (vLLM's name)"
    )
    max_num_batched_tokens: PositiveInt = Field(
        8192, description="tokens of one forward; a longer prompt takes several (vLLM's name)"
    )
    cuda_graphs: bool = Field(
        False, description="replay decode steps as CUDA graphs (written for CUDA, not yet measured on a GPU)"
    )
    block_size: PositiveInt = Field(16, description="tokens of a block of the paged KV cache")
    num_engines: NonNegativeInt | None = Field(
        None,
        description="engines in processes of their own, which generate while the trainer trains; 0 "
        "generates in the trainer's process; null is 1 with rollout.max_staleness above 0, else 0",
    )
    delta_updates: bool = Field(
        False,
        description="send to engines on Ray only the bits that changed since the version that they have; it "
        "saves most with policies in bfloat16 and small learning rates",
    )
    colocated: bool = Field(
        False,
        description="trainer and engine use the device's memory in turns: the trainer's tensors are "
        "offloaded to host memory while the engine generates (on a CPU to a file in the run folder)",
    )


def idle_engine(engine: EngineConfig) -> Iterator[str]:
    """One sentence for each setting that was given and can have no effect."""
    if engine.cache_tokens is not None and engine.cache_tokens < engine.block_size:
        yield (
            f"engine.cache_tokens {engine.cache_tokens} is less than one block of engine.block_size "
            f"{engine.block_size}; raise it"
        )
