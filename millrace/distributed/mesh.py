"""The process groups that a layout's ranks form; the dimensions are those of `planner.layout`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

from millrace.planner.layout import DIMENSIONS, Layout, Sizes

_EXPERT_DIMENSIONS = ("pp", "dp_replicate", "ep_replicate", "ep", "cp", "tp")
# What architectures call the number of their experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Mesh:
    """The groups of this rank.

    Attributes:
        layout: what it was made of.
        device_type: of the tensors that its groups exchange, such as "cuda".
        device_mesh: torch's mesh with the dimensions `DIMENSIONS`; None for one process without a group.
    """

    def __init__(self, layout: Layout, device_type: str, device_mesh: DeviceMesh | None) -> None:
        """Made by `make_mesh`."""
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
        """Ranks along a dimension, `ep` among them.

        Raises:
            ValueError: there is no such dimension.
        """
        self._check_name(name)
        return int(getattr(self.layout, name))

    def rank(self, name: str) -> int:
        """This rank's place along a dimension.

        Raises:
            ValueError: there is no such dimension.
        """
        self._check_name(name)
        return self._place[name]

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks along a dimension, this one among them; None where it is alone.

        Raises:
            ValueError: there is no such dimension.
        """
        if self.size(name) == 1:
            return None
        mesh = self._experts if name == "ep" else self.device_mesh
        assert mesh is not None
        return mesh.get_group(name)

    @property
    def data_rank(self) -> int:
        """Which share of the segments is this rank's."""
        return self._place["dp_replicate"] * self.layout.dp_shard + self._place["dp_shard"]

    @property
    def num_data_ranks(self) -> int:
        """Into how many shares the segments are dealt."""
        return self.layout.num_data_ranks

    @property
    def device(self) -> torch.device:
        """Where the tensors that this rank exchanges live."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        index: Any = torch.get_device_module(self.device_type).current_device()
        return torch.device(self.device_type, index)

    @property
    def weights(self) -> DeviceMesh | None:
        """Over whom weights are sharded, and in a first dimension replicated where dp_replicate is above 1.

        Gradients are summed over the same ranks. None for one process without a group.
        """
        return self._weights

    @property
    def experts(self) -> DeviceMesh | None:
        """The ranks that share out the experts, a mesh of one dimension `ep`; None where they do not."""
        return None if self._experts is None else self._experts["ep"]

    @property
    def expert_weights(self) -> DeviceMesh | None:
        """As `weights`, for experts that are shared out over `ep`: among the ranks with the same experts."""
        if self._experts is None:
            return self._weights
        names = ("dp_replicate", "ep_replicate") if self.layout.dp_replicate > 1 else ("ep_replicate",)
        return self._experts[names]

    def check(self, config: PretrainedConfig) -> None:
        """Refuse a model that the layout does not divide.

        Raises:
            PlanError: with the two numbers that do not fit.
        """
        text = config.get_text_config()
        heads = text.num_attention_heads
        self.layout.check(
            Sizes(
                num_layers=text.num_hidden_layers,
                num_heads=heads,
                num_key_heads=getattr(text, "num_key_value_heads", None) or heads,
                vocabulary=text.vocab_size,
                mlp_width=getattr(text, "intermediate_size", None) or 0,
                num_experts=next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0),
            )
        )

    def sum_over(self, tensor_N: torch.Tensor, *names: str) -> torch.Tensor:
        """The sum over the ranks along the dimensions named, on `device`, without gradient.

        Raises:
            ValueError: there is no such dimension.
        """
        total_N = tensor_N.detach().to(self.device, copy=True)
        for name in names:
            group = self.group(name)
            if group is not None:
                dist.all_reduce(total_N, group=group)
        return total_N

    def _data_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """Over whom weights are sharded, and before that replicated if they are."""
        over = device_mesh["dp_shard"]
        if self.layout.cp > 1:
            # Ranks along cp hold other tokens, so to the weights they are like those along dp_shard.
            over = device_mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        if self.layout.dp_replicate == 1:
            return over
        return DeviceMesh._concatenate([device_mesh["dp_replicate"], over])

    def _check_name(self, name: str) -> None:
        if name not in self._place:
            raise ValueError(f"the mesh has no dimension {name!r}; it has {', '.join(self._place)}")


def make_mesh(layout: Layout, device_type: str) -> Mesh:
    """The groups of this rank; all ranks call it in step.

    A layout of one rank needs no process group, and has none of torch's machinery then.

    Args:
        layout: how the ranks are laid out.
        device_type: "cpu" or "cuda"; the process group must be able to exchange its tensors.

    Raises:
        PlanError: there are not as many ranks as the layout needs.
    """
    if not dist.is_initialized():
        layout.check_ranks(1)
        return Mesh(layout, device_type, None)
    layout.check_ranks(dist.get_world_size())
    return Mesh(layout, device_type, init_device_mesh(device_type, layout.shape, mesh_dim_names=DIMENSIONS))
