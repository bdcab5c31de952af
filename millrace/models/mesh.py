"""How ranks are laid out: how many each kind of parallelism takes, and which groups they form.

| dimension | ranks along it hold | tokens they see |
|---|---|---|
| pp | other layers | the same |
| dp_replicate | the same parts of the weights | other segments |
| dp_shard | other parts of the weights | other segments |
| cp | other parts of the weights | other tokens of the same segments |
| tp | other rows or columns of each weight | the same |

Neighbouring ranks differ in the last dimension first. Experts are dealt over `ep` ranks that are neighbours
along dp_shard.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

# Outermost first: what talks most lies closest together.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_EXPERT_DIMENSIONS = ("pp", "dp_replicate", "ep_replicate", "ep", "cp", "tp")
# What architectures call the number of their experts, and the widths that tp cuts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks each kind of parallelism takes.

    Attributes:
        dp_replicate: groups of ranks that each hold the whole model and see other segments.
        dp_shard: ranks that share out the weights (FSDP) and see other segments.
        tp: ranks that share out each layer's matrices.
        pp: ranks that share out the layers.
        cp: ranks that share out the tokens of a segment.
        ep: ranks that share out the experts; a part of dp_shard, so it adds no ranks.

    Raises:
        ValueError: a number is below 1, ep does not divide dp_shard, or ep and cp are both above 1.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"mesh.{name} is {size}; it must be at least 1, which means not split")
        if self.dp_shard % self.ep:
            raise ValueError(
                f"mesh.ep is {self.ep}, which does not divide mesh.dp_shard {self.dp_shard}: experts are "
                f"dealt over a part of it; make dp_shard a multiple of ep"
            )
        if self.ep > 1 and self.cp > 1:
            raise ValueError(f"mesh.ep is {self.ep} and mesh.cp is {self.cp}; set one of them to 1")

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `DIMENSIONS`."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def num_ranks(self) -> int:
        """Processes it takes."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in asdict(self).items() if size > 1 and name != "ep"]
        return " x ".join(parts) or "of one rank"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands along each dimension, and among the ranks that share out the experts (`ep`).

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}, but the layout {self} has ranks 0 to {self.num_ranks - 1}")
        place = {}
        left = rank
        for name, size in reversed(list(zip(DIMENSIONS, self.shape, strict=True))):
            left, place[name] = divmod(left, size)
        return {name: place[name] for name in DIMENSIONS} | {"ep": place["dp_shard"] % self.ep}

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of processes that is not the layout's.

        Raises:
            ValueError: with both numbers.
        """
        if num_ranks != self.num_ranks:
            raise ValueError(
                f"the layout {self} needs {self.num_ranks} ranks, and there are {num_ranks}; "
                f"start {self.num_ranks} processes or change the mesh"
            )

    def check(self, config: PretrainedConfig) -> None:
        """Refuse a layout that does not divide a model.

        How cp shares out heads is checked where it is used, since only one of its kinds needs it.

        Args:
            config: the model's.

        Raises:
            ValueError: with the two numbers that do not fit.
        """
        text = config.get_text_config()
        heads = text.num_attention_heads
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        cut = {"attention heads": heads, "key heads": key_heads, "tokens in the vocabulary": text.vocab_size}
        for field in _WIDTHS:
            if isinstance(getattr(text, field, None), int):
                cut[f"{field} (width of the MLP)"] = getattr(text, field)
        for what, size in cut.items():
            if size % self.tp:
                raise ValueError(
                    f"mesh.tp is {self.tp}, which does not divide the model's {size} {what}; "
                    f"choose a tp that divides {math.gcd(*cut.values())}"
                )
        if text.num_hidden_layers < self.pp:
            raise ValueError(
                f"mesh.pp is {self.pp}, but the model has {text.num_hidden_layers} layers; "
                f"choose a pp of at most that"
            )
        experts = next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0)
        if self.ep > 1 and not experts:
            raise ValueError(
                f"mesh.ep is {self.ep}, but a {text.model_type} has no experts; set mesh.ep to 1"
            )
        if experts % self.ep:
            raise ValueError(
                f"mesh.ep is {self.ep}, which does not divide the model's {experts} experts; "
                f"choose an ep that does"
            )

    def table(self) -> str:
        """Rank by rank where it stands, one line each; dimensions of one rank are left out."""
        names = [name for name in (*DIMENSIONS, "ep") if getattr(self, name) > 1]
        lines = [("rank", *names)]
        for rank in range(self.num_ranks):
            place = self.coordinates(rank)
            lines.append((str(rank), *(str(place[name]) for name in names)))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )


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
        self._check(name)
        return int(getattr(self.layout, name))

    def rank(self, name: str) -> int:
        """This rank's place along a dimension.

        Raises:
            ValueError: there is no such dimension.
        """
        self._check(name)
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
        return self.layout.dp_replicate * self.layout.dp_shard

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

    def _check(self, name: str) -> None:
        if name not in self._place:
            raise ValueError(f"the mesh has no dimension {name!r}; it has {', '.join(self._place)}")


def make_mesh(layout: Layout, device_type: str) -> Mesh:
    """The groups of this rank; all ranks call it in step.

    A layout of one rank needs no process group, and has none of torch's machinery then.

    Args:
        layout: how the ranks are laid out.
        device_type: "cpu" or "cuda"; the process group must be able to exchange its tensors.

    Raises:
        ValueError: there are not as many ranks as the layout needs.
    """
    if not dist.is_initialized():
        layout.check_ranks(1)
        return Mesh(layout, device_type, None)
    layout.check_ranks(dist.get_world_size())
    return Mesh(layout, device_type, init_device_mesh(device_type, layout.shape, mesh_dim_names=DIMENSIONS))
