"""Process groups of a layout; its dimensions are those of `planner.layout`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

from millrace.planner.layout import DIMENSIONS, Layout, Sizes

_EXPERT_DIMENSIONS = ("pp", "dp_replicate", "ep_replicate", "ep", "cp", "tp")
# Config attributes for the number of experts, by architecture.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Mesh:
    """The process groups of this rank.

    `device_type` is that of communicated tensors, such as "cuda". `device_mesh` is torch's mesh with the
    dimensions `DIMENSIONS`, None for one process without a process group. An unknown dimension is a
    ValueError.
    """

    def __init__(self, layout: Layout, device_type: str, device_mesh: DeviceMesh | None) -> None:
        self.layout = layout
        self.device_type = device_type
        self.device_mesh = device_mesh
        self._place = layout.coordinates(0 if device_mesh is None else dist.get_rank())
        self._experts: DeviceMesh | None = None
        self._weights = device_mesh
        if device_mesh is None:
            return
        if layout.ep > 1:
            pp, replicate, shard, cp, tp = layout.shape
            self._experts = init_device_mesh(
                device_type,
                (pp, replicate, shard // layout.ep, layout.ep, cp, tp),
                mesh_dim_names=_EXPERT_DIMENSIONS,
            )
        self._weights = self._data_mesh(device_mesh)

    def size(self, name: str) -> int:
        """Return the number of ranks along a dimension, including `ep`."""
        self._check_name(name)
        return int(getattr(self.layout, name))

    def rank(self, name: str) -> int:
        """Return this rank's coordinate along a dimension."""
        self._check_name(name)
        return self._place[name]

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return this rank's process group along a dimension; None if its size is 1."""
        if self.size(name) == 1:
            return None
        mesh = self._experts if name == "ep" else self.device_mesh
        assert mesh is not None
        return mesh.get_group(name)

    @property
    def data_rank(self) -> int:
        """Index of this rank's data shard."""
        return self._place["dp_replicate"] * self.layout.dp_shard + self._place["dp_shard"]

    @property
    def num_data_ranks(self) -> int:
        """Number of data shards."""
        return self.layout.num_data_ranks

    @property
    def device(self) -> torch.device:
        """Device of communicated tensors."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        index: Any = torch.get_device_module(self.device_type).current_device()
        return torch.device(self.device_type, index)

    @property
    def weights(self) -> DeviceMesh | None:
        """Mesh over which weights are sharded, and with dp_replicate above 1 replicated in dimension 0.

        Gradients are summed over the same ranks. None for one process without a process group.
        """
        return self._weights

    @property
    def experts(self) -> DeviceMesh | None:
        """Mesh with the one dimension `ep`, over which experts are sharded; None if ep is 1."""
        return None if self._experts is None else self._experts["ep"]

    @property
    def expert_weights(self) -> DeviceMesh | None:
        """Like `weights`, for experts that are sharded over `ep`: the ranks with the same experts."""
        if self._experts is None:
            return self._weights
        names = ("dp_replicate", "ep_replicate") if self.layout.dp_replicate > 1 else ("ep_replicate",)
        return self._experts[names]

    def check(self, config: PretrainedConfig) -> None:
        """Refuse a model with sizes that the layout does not divide: a PlanError with both numbers."""
        self.layout.check(sizes_of(config))

    def sum_over(self, tensor_N: torch.Tensor, *names: str) -> torch.Tensor:
        """All-reduce (sum) along the named dimensions, on `device`, without gradient."""
        total_N = tensor_N.detach().to(self.device, copy=True)
        for name in names:
            group = self.group(name)
            if group is not None:
                dist.all_reduce(total_N, group=group)
        return total_N

    def _data_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        over = device_mesh["dp_shard"]
        if self.layout.cp > 1:
            # Ranks along cp hold different tokens, so weights are sharded over them as over dp_shard.
            over = device_mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        if self.layout.dp_replicate == 1:
            return over
        return DeviceMesh._concatenate([device_mesh["dp_replicate"], over])

    def _check_name(self, name: str) -> None:
        if name not in self._place:
            raise ValueError(f"the mesh has no dimension {name!r}; it has {', '.join(self._place)}")


def sizes_of(config: PretrainedConfig) -> Sizes:
    """Return the sizes of a model that layouts divide."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return Sizes(
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_key_heads=getattr(text, "num_key_value_heads", None) or heads,
        vocabulary=text.vocab_size,
        mlp_width=getattr(text, "intermediate_size", None) or 0,
        num_experts=next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0),
    )


def make_mesh(layout: Layout, device_type: str) -> Mesh:
    """Build the process groups of a layout; all ranks call it in step.

    A layout of one rank works without a process group. Otherwise the group must support tensors of
    `device_type`, "cpu" or "cuda", and have as many ranks as the layout; if not, it is a PlanError.
    """
    if not dist.is_initialized():
        layout.check_ranks(1)
        return Mesh(layout, device_type, None)
    layout.check_ranks(dist.get_world_size())
    return Mesh(layout, device_type, init_device_mesh(device_type, layout.shape, mesh_dim_names=DIMENSIONS))
