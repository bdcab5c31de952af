"""Tensor parallelism: every rank of the mesh dimension `tp` holds a slice of each large weight.

T = packed tokens, D = model width.

In each layer, attention and feed-forward are regions. What enters a region is the same on all ranks; inside,
each rank computes its own heads or columns; what leaves is the sum over the ranks. With `sequence`, each rank
carries its own share of the tokens from region to region (residual stream and norms): they are gathered on
entering and dealt out again on leaving.

Every parameter becomes a DTensor over `tp`, so that `fully_shard`, `full_tensor`, optimizers and checkpoints
know what each rank holds. A module reads its own as this rank's plain local tensors, so that every kernel
works as in one process. A gradient is summed over the ranks where each has only its part of it: that of a
whole parameter inside a region (norms of the heads), and with `sequence` of every other one in a layer.

Source: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing activation recomputation in
large transformer models" (sequence parallel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers import PreTrainedModel

from millrace.distributed.collectives import FEATURES, TOKENS, Change, Peers, same
from millrace.distributed.mesh import Mesh
from millrace.models import fused
from millrace.models.facts import experts_of
from millrace.models.logprobs import deterministic

# The dimension of a linear weight that is sliced: its rows make columns of the output.
SLICED = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}
# What the layers of one region may be.
WAYS = ({"colwise", "rowwise"}, {"colwise_gather_output", "rowwise_split_input"})
# Left alone: experts stay whole (`models.expert` deals them out), and which gradients are summed follows from
# the regions.
WHOLE = {"packed_colwise", "packed_rowwise", "moe_tp_experts", "replicated_with_grad_allreduce", "replicate"}
LLAMA = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# Where transformers has no plan.
PLANS = {"hunyuan_v1_dense": LLAMA}


def apply(model: PreTrainedModel, mesh: Mesh, *, sequence: bool) -> None:
    """Slice a decoder over the mesh dimension `tp`, in place; nothing happens where that is 1.

    Linear layers are sliced as transformers' own plan says, embedding and head by rows of the vocabulary. The
    embedding gives whole hidden states, and so does the last layer, whatever `sequence` is: only
    `logprobs.output_head(model)` is a slice, and says of what. Gradients arrive complete on every rank, for
    the same loss on all ranks of `tp`. Call it on a model that `load` gave, after experts were dealt over
    `ep` and before `fully_shard`.

    Args:
        model: every rank has the same one (or one on the meta device), or the same stage of one; its layout
            has been checked.
        mesh: of the run.
        sequence: slice the tokens between regions too; the length of a row need not be a multiple of `tp`.

    Raises:
        ValueError: the architecture cannot be sliced, a width does not divide, or the model is deterministic;
            nothing is changed then.
    """
    group = mesh.group("tp")
    if group is None or mesh.device_mesh is None:
        return
    if deterministic(model):
        raise ValueError(
            f"mesh.tp is {mesh.size('tp')}, and sums over ranks do not give a token the same bits in every "
            "batch, which a deterministic model must; set mesh.tp to 1"
        )
    regions = _regions(model, mesh.size("tp"))
    layers = _layers(model)
    if sequence:
        _check_sequence(model, layers, regions)
    peers = Peers(group)
    slices: dict[nn.Module, dict[str, int]] = {}
    for region in regions:
        region.module.register_forward_pre_hook(_entering(peers, sequence), with_kwargs=True)
        for linear, style in region.styles.items():
            slices[linear] = {"weight": SLICED[style]} | ({} if SLICED[style] else {"bias": 0})
            _hook(linear, style, peers, sequence)
    if sequence:
        layers[0].register_forward_pre_hook(_own_tokens(peers), with_kwargs=True)
        layers[-1].register_forward_hook(_all_tokens(peers), with_kwargs=True)
    embedding, head = _vocabulary(model)
    if embedding is not None:
        slices[embedding] = {"weight": 0}
    if head is not None:
        slices[head] = {"weight": 0, "bias": 0}
    _localise(model, mesh.device_mesh["tp"], slices, _summed(layers, regions, sequence), peers)
    if embedding is not None:
        _by_rows(embedding, peers)


@dataclass(frozen=True, slots=True)
class _Region:
    """A module in which each rank computes a part, and how its linear layers are sliced."""

    module: nn.Module
    styles: dict[nn.Linear, str]

    @property
    def joins(self) -> bool:
        """Whether columns are put together again at once, so that what follows is the same on all ranks."""
        return "colwise_gather_output" in self.styles.values()

    @property
    def inside(self) -> set[nn.Module]:
        """All its modules but those at the exit, whose bias is added to the sum."""
        rows = {linear for linear, style in self.styles.items() if SLICED[style] == 1}
        return set(self.module.modules()) - rows


def _regions(model: PreTrainedModel, num_ranks: int) -> list[_Region]:
    kind = model.config.get_text_config().model_type
    plan = PLANS.get(kind) or getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"a {kind} has no plan for tensor parallelism; set mesh.tp to 1")
    found: dict[str, dict[nn.Linear, str]] = {}
    for name, module in model.base_model.named_modules():
        style = plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style is None or style in WHOLE:
            continue
        if style not in SLICED or type(module) not in (nn.Linear, fused.Linear):
            raise ValueError(
                f"transformers plans {style} for {name}, a {type(module).__name__}, which tensor parallelism "
                f"cannot slice; set mesh.tp to 1 for this {kind}"
            )
        _check_divides(num_ranks, name, module.weight.shape[SLICED[style]])
        found.setdefault(name.rpartition(".")[0], {})[module] = style
    for name, styles in found.items():
        if set(styles.values()) not in WAYS:
            planned = " and ".join(sorted(set(styles.values())))
            raise ValueError(
                f"transformers plans {planned} within {name}, which tensor parallelism cannot slice; "
                f"set mesh.tp to 1 for this {kind}"
            )
    for what, module in zip(("embedding", "head"), _vocabulary(model), strict=True):
        if module is not None:
            _check_divides(num_ranks, f"the {what}", len(module.weight))
    return [_Region(model.base_model.get_submodule(name), styles) for name, styles in found.items()]


def _check_divides(num_ranks: int, name: str, size: int) -> None:
    if size % num_ranks:
        raise ValueError(
            f"mesh.tp is {num_ranks}, which does not divide the {size} rows or columns of {name}; "
            "choose a tp that does"
        )


def _check_sequence(model: PreTrainedModel, layers: list[nn.Module], regions: list[_Region]) -> None:
    if experts_of(model) and getattr(model.config, "_experts_implementation", None) == "eager":
        # Each read of a weight is a sum over the ranks in the backward; the loop reads what its tokens chose.
        raise ValueError(
            f"the experts of this {model.config.model_type} are computed by transformers' eager loop, which "
            "differs from rank to rank; turn sequence parallelism off, or choose other experts than eager"
        )
    known = {region.module for region in regions}
    for layer in layers:
        for name, module in layer.named_modules():
            # What attends has the number of its layer.
            if name and hasattr(module, "layer_idx") and module not in known:
                raise ValueError(
                    f"{name}, a {type(module).__name__}, is not sliced by tensor parallelism, so it needs "
                    "all tokens on each rank; turn sequence parallelism off for this model"
                )


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of this model, or of this stage of one."""
    lists = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists)} lists of layers where tensor parallelism needs one; "
            "set mesh.tp to 1"
        )
    return [layer for layer in lists[0] if next(layer.parameters(), None) is not None]


def _vocabulary(model: PreTrainedModel) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """The embedding and the output head, where this model (or stage of one) has them."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (
        embedding if isinstance(embedding, nn.Embedding) else None,
        head if isinstance(head, nn.Linear) else None,
    )


def _entering(peers: Peers, sequence: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x_TD = args[0] if args else kwargs["hidden_states"]
        x_TD = peers.gather(x_TD)[..., : _num_tokens(kwargs), :] if sequence else peers.enter(x_TD)
        return ((x_TD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x_TD})

    return hook


def _hook(linear: nn.Linear, style: str, peers: Peers, sequence: bool) -> None:
    """What a linear layer's slice asks for before and after its product."""

    def leaving(linear: Any, args: tuple[Tensor, ...], y_TD: Tensor) -> Tensor:
        total_TD = peers.scatter(y_TD) if sequence else peers.leave(y_TD)
        # Once, and not on every rank before the sum.
        return total_TD if linear.bias_of_sum is None else total_TD + linear.bias_of_sum

    if style == "colwise_gather_output":
        linear.register_forward_hook(lambda linear, args, y: peers.whole(y, FEATURES))
    if style == "rowwise_split_input":
        linear.register_forward_pre_hook(lambda linear, args: peers.split(args[0], FEATURES))
    if SLICED[style] == 1:
        linear.register_forward_hook(leaving)


def _own_tokens(peers: Peers) -> Callable[..., Any]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (peers.split(args[0], TOKENS), *args[1:]), kwargs

    return hook


def _all_tokens(peers: Peers) -> Callable[..., Any]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y_TD: Tensor) -> Tensor:
        # Not a view, which FSDP warns of where a layer's forward gives one.
        return peers.whole(y_TD, TOKENS)[..., : _num_tokens(kwargs), :].clone()

    return hook


def _num_tokens(kwargs: dict[str, Any]) -> int | None:
    """T of a call with rotary positions; None for one without, which may keep the rows it was filled with."""
    angles = kwargs.get("position_embeddings")
    return None if angles is None else angles[0].shape[TOKENS]


def _summed(layers: list[nn.Module], regions: list[_Region], sequence: bool) -> set[nn.Module]:
    """The modules of whose whole parameters each rank's gradient is only a part."""
    inside = {module for region in regions if not region.joins for module in region.inside}
    if not sequence:
        return inside
    joined = {module for region in regions if region.joins for module in region.inside}
    return {module for layer in layers for module in layer.modules()} - joined


def _localise(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    slices: dict[nn.Module, dict[str, int]],
    summed: set[nn.Module],
    peers: Peers,
) -> None:
    """Every parameter a DTensor, and every module one that reads the local part of its own."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay one
    for module in model.modules():
        read: dict[str, Any] = {}
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            dim = slices.get(module, {}).get(name)
            enter = peers.enter if dim is None and module in summed else same
            if isinstance(parameter, DTensor):
                read[name] = property(_reader(name, partial(_of_local, enter)))
                continue
            if parameter not in made:
                made[parameter] = _distributed(parameter, mesh, Replicate() if dim is None else Shard(dim))
            module._parameters[name] = made[parameter]
            read[name] = property(_reader(name, partial(_local, enter)))
        if slices.get(module, {}).get("weight") == 1:
            read |= {"bias": None, "bias_of_sum": read.get("bias")}
        if read:
            module.__class__ = type(type(module).__name__, (type(module),), read)


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    local = parameter.detach()
    if isinstance(placement, Shard):
        # Cloned, or the whole weight would stay in memory.
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone(
            memory_format=torch.contiguous_format
        )
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False), requires_grad=parameter.requires_grad
    )


def _local(change: Change, parameter: DTensor) -> Tensor:
    return change(parameter.to_local())


def _of_local(change: Change, dealt: DTensor) -> DTensor:
    """A DTensor over other ranks (an expert's weight over `ep`), its local part changed."""
    return DTensor.from_local(change(dealt.to_local()), dealt.device_mesh, dealt.placements, run_check=False)


def _reader(name: str, local: Callable[[DTensor], Tensor]) -> Callable[[nn.Module], Tensor]:
    def read(module: nn.Module) -> Tensor:
        parameter: Any = module._parameters[name]
        # While it is sharded over data ranks too, there is nothing local to compute with; only FSDP looks.
        return local(parameter) if parameter.device_mesh.ndim == 1 else parameter

    return read


def _by_rows(embedding: nn.Embedding, peers: Peers) -> None:
    """An embedding that looks its own rows up and takes the others' from the sum."""
    num_rows = len(embedding.weight)
    first_row = peers.group.rank() * num_rows
    if embedding.padding_idx is not None:
        padding = embedding.padding_idx - first_row
        embedding.padding_idx = padding if 0 <= padding < num_rows else None

    class Rows(type(embedding)):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            row = input - first_row
            own = (row >= 0) & (row < num_rows)
            x_TD: Tensor = super().forward(row.where(own, 0))
            return peers.leave(x_TD.masked_fill(~own[..., None], 0.0))

    embedding.__class__ = Rows
