"""How a run is spread over ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from millrace.config.section import Section


class MeshConfig(Section):
    """How many ranks a run has and what each of them holds; one rank is this process alone."""

    dp_shard: PositiveInt = Field(
        1, description="ranks that share out a batch, weights, gradients and optimizer states (FSDP2)"
    )
    dp_replicate: PositiveInt = Field(
        1,
        description="groups of such ranks, each of which holds all weights (HSDP)",
    )
    compute: Literal["float32", "bfloat16"] | None = Field(
        None, description="dtype of forward and backward where weights are sharded; null is the precision"
    )
    reshard_after_forward: bool = Field(
        True, description="give a layer's gathered weights back between its forward and its backward"
    )
    offload: bool = Field(False, description="keep weights, gradients and optimizer states in host memory")
    checkpointing: Literal["none", "full", "selective"] = Field(
        "none", description="recompute layers in the backward: all of them, or all but matrix products"
    )

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.dp_shard * self.dp_replicate
