"""Tensor parallelism: every rank of the mesh dimension `tp` holds a slice of each large weight.

T = packed tokens, D = model width.

In each layer, attention and feed-forward are regions. The input of a region is replicated. Inside, each rank
computes its own heads or columns. The output is all-reduced. With `sequence` (sequence parallelism), residual
stream and norms are sharded by tokens: an all-gather at the entry of a region, a reduce-scatter at its exit.

Every parameter becomes a DTensor over `tp`, so that `fully_shard`, `full_tensor`, optimizers and checkpoints
know each rank's shards. A module reads its parameters as plain local tensors, so every kernel works as in one
process. A gradient is summed over the ranks if each rank has only a part of it. This holds for a replicated
parameter inside a region (norms of the heads), and with `sequence` for every other one in a layer.

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

# The sliced dimension of a linear weight; its rows are columns of the output.
SLICED = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}
# Valid combinations of styles in one region.
WAYS = ({"colwise", "rowwise"}, {"colwise_gather_output", "rowwise_split_input"})
# Ignored styles: `expert` shards the experts, and the regions determine which gradients are summed.
WHOLE = {"packed_colwise", "packed_rowwise", "moe_tp_experts", "replicated_with_grad_allreduce", "replicate"}
LLAMA = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# Plans that transformers lacks.
PLANS = {"hunyuan_v1_dense": LLAMA}


def apply(model: PreTrainedModel, mesh: Mesh, *, sequence: bool, setting: str = "mesh.tp") -> None:
    """Slice a decoder over the mesh dimension `tp` in place; do nothing if its size is 1.

    Linear layers are sliced by transformers' own plan, embedding and head by rows of the vocabulary.
    Embedding and last layer return complete hidden states with and without `sequence`. Only
    `logprobs.output_head(model)` is a slice, with its vocabulary range. Gradients are complete on every rank
    if all ranks of `tp` compute the same loss. A row's length need not be a multiple of `tp`. Call it on a
    model from `load` or a pipeline stage, possibly on the meta device, whose layout has been checked, after
    experts are sharded over `ep` and before `fully_shard`. Errors name `setting`, that of the size of `tp`.

    Raises:
        ValueError: the architecture cannot be sliced, a width is not divisible, or the model is
            deterministic; the model is unchanged then.
    """
    group = mesh.group("tp")
    if group is None or mesh.device_mesh is None:
        return
    if deterministic(model):
        raise ValueError(
            f"{setting} is {mesh.size('tp')}, and sums over ranks do not give a token the same bits in every "
            f"batch, which a deterministic model must; set {setting} to 1"
        )
    regions = _regions(model, mesh.size("tp"), setting)
    layers = _layers(model, setting)
    if sequence:
        _check_sequence(model, layers, regions)
    peers = Peers(group)
    slices: dict[nn.Module, dict[str, int]] = {}
    for region in regions:
        region.module.register_forward_pre_hook(partial(_entering, peers, sequence), with_kwargs=True)
        for linear, style in region.styles.items():
            slices[linear] = {"weight": SLICED[style]} | ({} if SLICED[style] else {"bias": 0})
            _hook(linear, style, peers, sequence)
    if sequence:
        layers[0].register_forward_pre_hook(partial(_own_tokens, peers), with_kwargs=True)
        layers[-1].register_forward_hook(partial(_all_tokens, peers), with_kwargs=True)
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
    module: nn.Module
    styles: dict[nn.Linear, str]

    @property
    def joins(self) -> bool:
        """Whether columns are all-gathered at once, so that later computation is replicated."""
        return "colwise_gather_output" in self.styles.values()

    @property
    def inside(self) -> set[nn.Module]:
        """All modules except row-sliced ones at the exit; their bias is added after the all-reduce."""
        rows = {linear for linear, style in self.styles.items() if SLICED[style] == 1}
        return set(self.module.modules()) - rows


def _regions(model: PreTrainedModel, num_ranks: int, setting: str) -> list[_Region]:
    kind = model.config.get_text_config().model_type
    plan = PLANS.get(kind) or getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"a {kind} has no plan for tensor parallelism; set {setting} to 1")
    found: dict[str, dict[nn.Linear, str]] = {}
    for name, module in model.base_model.named_modules():
        style = plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style is None or style in WHOLE:
            continue
        if style not in SLICED or type(module) not in (nn.Linear, fused.Linear):
            raise ValueError(
                f"transformers plans {style} for {name}, a {type(module).__name__}, which tensor parallelism "
                f"cannot slice; set {setting} to 1 for this {kind}"
            )
        _check_divides(num_ranks, setting, name, module.weight.shape[SLICED[style]])
        found.setdefault(name.rpartition(".")[0], {})[module] = style
    for name, styles in found.items():
        if set(styles.values()) not in WAYS:
            planned = " and ".join(sorted(set(styles.values())))
            raise ValueError(
                f"transformers plans {planned} within {name}, which tensor parallelism cannot slice; "
                f"set {setting} to 1 for this {kind}"
            )
    for what, module in zip(("embedding", "head"), _vocabulary(model), strict=True):
        if module is not None:
            _check_divides(num_ranks, setting, f"the {what}", len(module.weight))
    return [_Region(model.base_model.get_submodule(name), styles) for name, styles in found.items()]


def _check_divides(num_ranks: int, setting: str, name: str, size: int) -> None:
    if size % num_ranks:
        raise ValueError(
            f"{setting} is {num_ranks}, which does not divide the {size} rows or columns of {name}; "
            f"choose a {setting.rpartition('.')[2]} that does"
        )


def _check_sequence(model: PreTrainedModel, layers: list[nn.Module], regions: list[_Region]) -> None:
    if experts_of(model) and getattr(model.config, "_experts_implementation", None) == "eager":
        # Each read of a weight is an all-reduce in the backward; the loop reads only experts that tokens
        # chose.
        raise ValueError(
            f"the experts of this {model.config.model_type} are computed by transformers' eager loop, which "
            "differs from rank to rank; turn sequence parallelism off, or choose other experts than eager"
        )
    known = {region.module for region in regions}
    for layer in layers:
        for name, module in layer.named_modules():
            # Attention modules have a `layer_idx`.
            if name and hasattr(module, "layer_idx") and module not in known:
                raise ValueError(
                    f"{name}, a {type(module).__name__}, is not sliced by tensor parallelism, so it needs "
                    "all tokens on each rank; turn sequence parallelism off for this model"
                )


def _layers(model: PreTrainedModel, setting: str) -> list[nn.Module]:
    lists = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists)} lists of layers where tensor parallelism needs one; "
            f"set {setting} to 1"
        )
    return [layer for layer in lists[0] if next(layer.parameters(), None) is not None]


def _vocabulary(model: PreTrainedModel) -> tuple[nn.Embedding | None, nn.Linear | None]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (
        embedding if isinstance(embedding, nn.Embedding) else None,
        head if isinstance(head, nn.Linear) else None,
    )


def _entering(
    peers: Peers, sequence: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    x_TD = args[0] if args else kwargs["hidden_states"]
    x_TD = peers.gather(x_TD)[..., : _num_tokens(kwargs), :] if sequence else peers.enter(x_TD)
    return ((x_TD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x_TD})


def _hook(linear: nn.Linear, style: str, peers: Peers, sequence: bool) -> None:
    def leaving(linear: Any, args: tuple[Tensor, ...], y_TD: Tensor) -> Tensor:
        total_TD = peers.scatter(y_TD) if sequence else peers.leave(y_TD)
        # Once after the sum, not on every rank before it.
        return total_TD if linear.bias_of_sum is None else total_TD + linear.bias_of_sum

    if style == "colwise_gather_output":
        linear.register_forward_hook(lambda linear, args, y: peers.whole(y, FEATURES))
    if style == "rowwise_split_input":
        linear.register_forward_pre_hook(lambda linear, args: peers.split(args[0], FEATURES))
    if SLICED[style] == 1:
        linear.register_forward_hook(leaving)


def _own_tokens(peers: Peers, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (peers.split(args[0], TOKENS), *args[1:]), kwargs


def _all_tokens(peers: Peers, layer: nn.Module, args: Any, kwargs: dict[str, Any], y_TD: Tensor) -> Tensor:
    # Not a view, because FSDP warns of views as outputs of a forward.
    return peers.whole(y_TD, TOKENS)[..., : _num_tokens(kwargs), :].clone()


def _num_tokens(kwargs: dict[str, Any]) -> int | None:
    """Return T of a call with rotary positions; None without them, where the padding may stay."""
    angles = kwargs.get("position_embeddings")
    return None if angles is None else angles[0].shape[TOKENS]


def _summed(layers: list[nn.Module], regions: list[_Region], sequence: bool) -> set[nn.Module]:
    """Return the modules with partial gradients of replicated parameters on each rank."""
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
    made: dict[nn.Parameter, nn.Parameter] = {}  # keeps tied parameters tied
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
        # Cloned to free the complete weight.
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone(
            memory_format=torch.contiguous_format
        )
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False), requires_grad=parameter.requires_grad
    )


def _local(change: Change, parameter: DTensor) -> Tensor:
    return change(parameter.to_local())


def _of_local(change: Change, dealt: DTensor) -> DTensor:
    return DTensor.from_local(change(dealt.to_local()), dealt.device_mesh, dealt.placements, run_check=False)


def _reader(name: str, local: Callable[[DTensor], Tensor]) -> Callable[[nn.Module], Tensor]:
    def read(module: nn.Module) -> Tensor:
        parameter: Any = module._parameters[name]
        # While it is also sharded over data ranks, only FSDP reads it, and there is no local tensor to
        # compute with.
        return local(parameter) if parameter.device_mesh.ndim == 1 else parameter

    return read


def _by_rows(embedding: nn.Embedding, peers: Peers) -> None:
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
