"""How a run is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
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


def idle_mesh(mesh: MeshConfig, *, precision: str, adapter: bool) -> Iterator[str]:
    """One sentence for each setting of the mesh that can have no effect, or does not go with another."""
    if mesh.num_ranks == 1:
        for name in ("compute", "reshard_after_forward", "offload", "checkpointing"):
            if getattr(mesh, name) != type(mesh).model_fields[name].default:
                yield f"mesh.{name} has no effect with one rank; remove it, or raise mesh.dp_shard"
    elif adapter:
        yield "model.adapter trains on one rank only; remove it, or mesh.dp_shard and mesh.dp_replicate"
    if mesh.compute is not None and precision != "float32":
        yield f"mesh.compute needs weights in float32, and precision is {precision}; remove one of them"
