"""Low-rank adapters (LoRA) on a model's linear layers, and frozen weights.

An adapted layer computes y = W x + s B A x, where W stays as it is, A and B learn, and s is alpha / rank (or
alpha / sqrt(rank), rank stabilised). Engines, critics and model folders get plain layers with the weight
W + s B A. A and B are kept in float32 at least, and so is what they add until it is rounded once.

R = rank, D = input width, N = output width.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; Kalajdzievski 2023, "A Rank
Stabilization Scaling Factor for Fine-Tuning with LoRA".
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from millrace.kernels import linear as products
from millrace.models.fused import Linear
from millrace.models.load import Model, ModelError
from millrace.models.saving import full_tensors, whole

ALL_LINEAR = "all-linear"


class Adapted(Linear):
    """A linear layer with a low-rank pair of matrices, added where `active`.

    `lora_A` [R, D] and `lora_B` [N, R] are layers under peft's names.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    alpha: float
    rank_stabilised: bool
    active: bool

    @classmethod
    def widen(cls, layer: Linear, rank: int, *, alpha: float, rank_stabilised: bool) -> Adapted:
        """Add a pair to a layer and freeze the layer itself; A is not yet initialized and B is zero."""
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        # A layer may have no memory yet; its pair is small.
        device = "cpu" if layer.weight.is_meta else layer.weight.device
        options = {"bias": False, "dtype": dtype, "device": device}
        layer.requires_grad_(False)
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.lora_A = skip_init(nn.Linear, layer.in_features, rank, **options)
        layer.lora_B = skip_init(nn.Linear, rank, layer.out_features, **options)
        nn.init.zeros_(layer.lora_B.weight)
        layer.alpha, layer.rank_stabilised, layer.active = alpha, rank_stabilised, True
        return layer

    @property
    def rank(self) -> int:
        """The rank R."""
        return self.lora_A.out_features

    @property
    def scale(self) -> float:
        """The factor s."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def forward(self, input: Tensor) -> Tensor:
        """Compute y, [..., N]."""
        if not self.active:
            return super().forward(input)
        if self.tile is not None:
            # The sampler multiplies by the merged weight, and the bits must match.
            return products.invariant_linear(input, self.merged_weight(), self.bias, tile=self.tile)
        plain = super().forward(input)
        narrow = products.linear(input.to(self.lora_A.weight.dtype), self.lora_A.weight)
        return (plain + self.scale * products.linear(narrow, self.lora_B.weight)).to(plain.dtype)

    def merged_weight(self) -> Tensor:
        """W + s B A, [N, D]: summed in the pair's dtype and rounded once to the layer's."""
        return self.merge(self.weight, self.lora_A.weight, self.lora_B.weight)

    def merge(self, weight_ND: Tensor, a_RD: Tensor, b_NR: Tensor) -> Tensor:
        """Compute `merged_weight` from given matrices, which may be this rank's parts."""
        change_ND = self.scale * (b_NR @ a_RD)
        return (weight_ND.to(change_ND.dtype) + change_ND).to(weight_ND.dtype)

    @torch.no_grad()
    def fold(self) -> None:
        """Become a plain layer with the merged weight."""
        self.weight.copy_(self.merged_weight())
        del self.lora_A, self.lora_B, self.alpha, self.rank_stabilised, self.active
        self.__class__ = Linear  # type: ignore[assignment]


def add_adapter(
    model: Model,
    *,
    rank: int,
    alpha: float,
    seed: int,
    targets: Sequence[str] = (ALL_LINEAR,),
    rank_stabilised: bool = False,
) -> None:
    """Put a fresh adapter into a model and freeze all the rest; the model's outputs do not change.

    A is uniform in +-1 / sqrt(D), as in peft, and B is zero. Targets are names of linear layers, whole or the
    end of one from a dot on, such as q_proj; `all-linear` is every one but the output head.

    Raises:
        ModelError: the rank is below 1, alpha is not above 0, the model has an adapter, or a target is not
            there or no linear layer; nothing is changed then.
    """
    if rank < 1:
        raise ModelError(f"rank is {rank}; an adapter's rank must be at least 1")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ModelError(f"alpha is {alpha}; an adapter's alpha must be a number above 0")
    layers = _targeted(model, targets)
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for layer in layers.values():
        adapted = Adapted.widen(layer, rank, alpha=alpha, rank_stabilised=rank_stabilised)
        bound = 1 / math.sqrt(layer.in_features)
        drawn_RD = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            adapted.lora_A.weight.copy_(drawn_RD)


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Return a model's adapted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Disable the adapter within the block, without a second copy of the base.

    A forward that needs a gradient must not cross the beginning or the end of the block.
    """
    layers = [layer for layer in adapted_layers(model).values() if layer.active]
    try:
        for layer in layers:
            layer.active = False
        yield
    finally:
        for layer in layers:
            layer.active = True


def merged(model: Model) -> Model:
    """Copy a model with its adapter merged into plain layers; a plain copy if it has none."""
    copied = copy.deepcopy(model)
    for layer in adapted_layers(copied).values():
        layer.fold()
    return copied


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight but an adapter's, otherwise like `saving.full_tensors` (a collective)."""
    pairs = {f"{name}.lora_{which}.weight" for name in adapted_layers(model) for which in "AB"}
    return ((name, weight) for name, weight in full_tensors(model) if name not in pairs)


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Like `base_tensors`, with the adapter merged."""
    layers = adapted_layers(model)
    for name, weight in base_tensors(model):
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            pair = (whole(matrix.weight.detach()) for matrix in (layer.lora_A, layer.lora_B))
            yield name, layer.merge(weight, *pair)
        else:
            yield name, weight


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keep weights from learning by name, with the wildcards of a shell (`model.layers.[01].*`).

    A tied weight is frozen by either of its names.

    Raises:
        ModelError: a pattern matches no weight, or none is left to learn.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            first = next(iter(named))
            raise ModelError(f"model.frozen {pattern!r} matches no weight; names are whole, such as {first}")
        for name in found:
            named[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in named.values()):
        raise ModelError(f"model.frozen {list(patterns)} leaves no weight to learn; remove a pattern")


def trained_weights(model: nn.Module) -> nn.ParameterList:
    """The trainable weights, in the model's order, for the optimizer."""
    return nn.ParameterList(weight for weight in model.parameters() if weight.requires_grad)


def linears(model: Model) -> dict[str, Linear]:
    """Find the layers that can have an adapter; ModelError if the model has one already.

    The head cannot, since its product is computed elsewhere.
    """
    if adapted_layers(model):
        raise ModelError("the model has an adapter already; merge it first")
    head = model.get_output_embeddings()
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))
    return {name: layer for name, layer in found if layer is not head}


def _targeted(model: Model, targets: Sequence[str]) -> dict[str, Linear]:
    there = linears(model)
    if list(targets) == [ALL_LINEAR]:
        return there
    if not targets:
        raise ModelError(f"adapter targets are empty; name layers or write {ALL_LINEAR}")
    chosen: set[str] = set()
    for target in targets:
        found = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}") and target]
        wrong = [name for name in found if name not in there]
        if wrong or not found:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in there))
            why = f"means {wrong[0]}, which an adapter cannot stand beside" if wrong else "is no layer"
            raise ModelError(f"adapter target {target!r} {why}; this model has: {known}")
        chosen.update(found)
    return {name: layer for name, layer in there.items() if name in chosen}
