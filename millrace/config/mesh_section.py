"""Settings of distributed training: how many ranks, and what each of them shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field, PositiveInt

from millrace.config.section import Section

# What a recipe may use, and the dimensions of the mesh that it does not go with.
UNDIVIDED = {
    "deterministic": ("tp",),
    "policy.kl.estimator full": ("tp", "cp", "pp"),
    "advantage kind token_baseline": ("tp",),
    "rollout.top_k": ("tp",),
    "rollout.top_p": ("tp",),
    "model.adapter": ("tp", "pp"),
    "policy.router_replay": ("tp", "pp", "cp"),
    "policy.router_aux_coefficient": ("tp", "pp", "cp"),
    "policy.router_bias_step": ("tp", "pp", "cp"),
    # Blocks of 8-bit moments lie over a weight's numbers as one rank has them.
    "policy.optimizer.kind adamw_8bit": ("dp_shard", "dp_replicate", "tp", "pp", "cp"),
    # The slices of one matrix may lie over two dimensions, and torch's loops mix no weights of two meshes.
    "policy.optimizer.kind muon": ("tp",),
    "policy.optimizer.kind module:function": ("tp", "ep"),
}


class MeshConfig(Section):
    """Ranks of the run and their parallelism; one rank is this process alone."""

    launcher: Literal["processes", "ray"] = Field(
        "processes",
        description="what starts the ranks, unless torchrun did: millrace on this machine, or Ray",
    )
    dp_shard: PositiveInt = Field(
        1, description="ranks that shard batch, weights, gradients and optimizer states (FSDP2)"
    )
    dp_replicate: PositiveInt = Field(
        1,
        description="replicas of such a group of ranks, each with all weights (HSDP)",
    )
    tp: PositiveInt = Field(1, description="ranks that shard each layer's matrices (tensor parallel)")
    pp: PositiveInt = Field(1, description="ranks that divide the layers (pipeline parallel)")
    cp: PositiveInt = Field(1, description="ranks that divide each sequence (context parallel)")
    ep: PositiveInt = Field(1, description="ranks of dp_shard that divide the experts (expert parallel)")
    sequence_parallel: bool = Field(False, description="with tp, shard the tokens between matrices too")
    pp_chunks: PositiveInt = Field(1, description="with pp, stages of each rank; more than 1 is interleaved")
    cp_kind: Literal["ulysses", "ring"] = Field(
        "ulysses", description="with cp, exchange heads (ulysses) or keys and values (ring)"
    )
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="dtype of forward and backward with sharded weights; null is the precision"
    )
    reshard_after_forward: bool = Field(
        True, description="free a layer's gathered weights between its forward and its backward"
    )
    offload: bool = Field(False, description="keep weights, gradients and optimizer states in host memory")
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none", description="recompute layers in the backward: all of each, or all but matrix products"
    )
    activation_offload: bool = Field(
        False, description="on a GPU, keep in host memory what layers keep for the backward"
    )

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.dp_shard * self.dp_replicate * self.tp * self.pp * self.cp


def idle_mesh(mesh: MeshConfig, *, precision: str, used: Mapping[str, bool]) -> Iterator[str]:
    """One sentence for each setting of the mesh without effect, or that does not go with what is `used`."""
    for name, needs in (("sequence_parallel", "tp"), ("pp_chunks", "pp"), ("cp_kind", "cp")):
        if getattr(mesh, name) != type(mesh).model_fields[name].default and getattr(mesh, needs) == 1:
            yield f"mesh.{name} has no effect with mesh.{needs} 1; remove it, or raise mesh.{needs}"
    if mesh.num_ranks == 1:
        for name in ("compute_dtype", "reshard_after_forward", "offload"):
            if getattr(mesh, name) != type(mesh).model_fields[name].default:
                yield f"mesh.{name} has no effect with one rank; remove it, or raise mesh.dp_shard"
    for key, names in UNDIVIDED.items():
        for name in names:
            if used[key] and getattr(mesh, name) > 1:
                yield f"{key} does not go with mesh.{name} above 1; set that to 1, or remove {key}"
    if mesh.cp > 1 and mesh.cp_kind == "ring" and used["deterministic"]:
        yield "deterministic does not go with mesh.cp_kind ring; set ulysses, or remove deterministic"
    if mesh.compute_dtype is not None and precision != "float32":
        yield f"mesh.compute_dtype needs weights in float32, and precision is {precision}; remove one of them"
