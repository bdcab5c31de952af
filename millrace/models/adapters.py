"""Low-rank adapters (LoRA) beside a model's linear layers, in peft's format, and weights that do not learn.

An adapted layer computes y = W x + s B A x, where W stays as it is, A and B learn, and s is alpha / rank (or
alpha / sqrt(rank), rank stabilised). Engines, critics and model folders get plain layers whose weight is
W + s B A. A and B are kept in float32 at least, and so is what they add until it is rounded once.

R = rank, D = input width, N = output width.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; Kalajdzievski 2023, "A Rank
Stabilization Scaling Factor for Fine-Tuning with LoRA".
"""

from __future__ import annotations

import copy
import fnmatch
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import skip_init

from millrace.kernels import linear as products
from millrace.models.fused import Linear
from millrace.models.load import Model, ModelError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Ours alone, and passed over by peft; in the weights' own header a second entry would stand in random order.
BASE = "base.sha256"
ALL_LINEAR = "all-linear"
# What peft writes before the name that a weight has in the adapted model.
_PREFIX = "base_model.model."
# Of peft's fields, those read here, and those that do not change what a trained adapter computes.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "base_model_name_or_path"}
_IDLE = {
    *("auto_mapping", "peft_version", "revision", "task_type", "inference_mode", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size"),
}
# Ways to begin that leave the base as it is.
_INITS = (True, False, "gaussian", "eva", "orthogonal")


class Adapted(Linear):
    """A linear layer and the pair of matrices beside it.

    Attributes:
        lora_A: [R, D], and lora_B: [N, R], as layers under peft's names.
        alpha: the factor's numerator.
        rank_stabilised: whether its denominator is sqrt(R) and not R.
        active: whether the pair adds anything now.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    alpha: float
    rank_stabilised: bool
    active: bool

    @classmethod
    def widen(cls, layer: Linear, rank: int, *, alpha: float, rank_stabilised: bool) -> Adapted:
        """Put a pair beside a layer and freeze the layer itself; A is not yet drawn and B is zero."""
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        options = {"bias": False, "dtype": dtype, "device": layer.weight.device}
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
        """R."""
        return self.lora_A.out_features

    @property
    def scale(self) -> float:
        """The factor s."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def forward(self, input: Tensor) -> Tensor:
        """The layer's product and what the pair adds, [..., N]."""
        if not self.active:
            return super().forward(input)
        if self.tile is not None:
            # The sampler multiplies by the merged weight, and its bits are asked for.
            return products.invariant_linear(input, self.merged_weight(), self.bias, tile=self.tile)
        plain = super().forward(input)
        narrow = products.linear(input.to(self.lora_A.weight.dtype), self.lora_A.weight)
        return (plain + self.scale * products.linear(narrow, self.lora_B.weight)).to(plain.dtype)

    def merged_weight(self) -> Tensor:
        """W + s B A, [N, D]: summed in the pair's dtype and rounded once to the layer's."""
        change = self.scale * (self.lora_B.weight @ self.lora_A.weight)
        return (self.weight.to(change.dtype) + change).to(self.weight.dtype)

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
    """Put a fresh adapter into a model and freeze all the rest; the model computes what it did before.

    A is uniform in +-1 / sqrt(D), as peft draws it, and B is zero.

    Args:
        model: a model from `models.load`, on any device.
        rank: of each pair.
        alpha: numerator of the factor.
        seed: of A.
        targets: names of linear layers, whole or the end of one from a dot on, such as q_proj; `all-linear`
            is every one but the output head.
        rank_stabilised: the factor is alpha / sqrt(rank).

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


def load_adapter(model: Model, folder: str | Path) -> None:
    """Put the adapter of a peft folder into a model and freeze all the rest.

    Which layers are adapted is what the folder's weights say. Its dropout is left out, as all dropout is.

    Args:
        model: the base that the adapter was made for, from `models.load`.
        folder: holds adapter_config.json and adapter_model.safetensors.

    Raises:
        ModelError: a file is missing or damaged, the adapter is of another kind than plain LoRA, or it was
            made for another base; nothing is changed then.
    """
    path = Path(folder)
    fields = _read_config(path, str(model.name_or_path or ""))
    linears = _linears(model)
    if not (path / WEIGHTS).is_file():
        raise ModelError(f"adapter folder {path} has no {WEIGHTS} (pickles are not read)")
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {path}: {WEIGHTS} is damaged: {error}") from None
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, which = key.removeprefix(_PREFIX).rpartition(".lora_")
        if name not in linears or which not in ("A.weight", "B.weight"):
            raise ModelError(
                f"adapter {path} was made for another base: it holds {key}, and this model has no linear "
                "layer for it that an adapter can stand beside"
            )
        pairs.setdefault(name, {})[which[0]] = tensor
    if not pairs:
        raise ModelError(f"adapter {path} holds no weights")
    for name, pair in pairs.items():
        _check_pair(path, name, pair, linears[name], fields["r"])
    model.requires_grad_(False)
    alpha, stabilised = fields["lora_alpha"], bool(fields.get("use_rslora"))
    for name, pair in pairs.items():
        layer = Adapted.widen(linears[name], fields["r"], alpha=alpha, rank_stabilised=stabilised)
        with torch.no_grad():
            layer.lora_A.weight.copy_(pair["A"])
            layer.lora_B.weight.copy_(pair["B"])


def save_adapter(model: Model, folder: Path, *, base: str = "") -> None:
    """Write a model's adapter as a folder that peft and `load_adapter` read.

    Args:
        model: has an adapter.
        folder: made where it is not there.
        base: a checksum of the base's weights, written besides for `saved_base`; empty writes none.

    Raises:
        ModelError: the model has no adapter.
    """
    layers = adapted_layers(model)
    if not layers:
        raise ModelError("the model has no adapter to save; set model.adapter")
    first = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.name_or_path) or None,
        "r": first.rank,
        "lora_alpha": int(first.alpha) if first.alpha == int(first.alpha) else first.alpha,
        "lora_dropout": 0.0,
        "use_rslora": first.rank_stabilised,
        "target_modules": sorted(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    tensors = {
        f"{_PREFIX}{name}.lora_{which}.weight": pair.weight.detach().contiguous()
        for name, layer in layers.items()
        for which, pair in (("A", layer.lora_A), ("B", layer.lora_B))
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if base:
        (folder / BASE).write_text(base, encoding="utf-8")


def saved_base(folder: Path) -> str:
    """The checksum that `save_adapter` was given; empty where there is none."""
    path = folder / BASE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """A model's adapted layers by name; none where it has no adapter."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The base alone within the block, without a second copy of it.

    A forward whose gradient is needed must be over before the block is left or begun.
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
    """A copy of a model, its adapter folded into plain layers; a copy alone where it has none."""
    copied = copy.deepcopy(model)
    for layer in adapted_layers(copied).values():
        layer.fold()
    return copied


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, the adapter folded in; tied weights once."""
    layers = adapted_layers(model)
    pairs = {id(pair.weight) for layer in layers.values() for pair in (layer.lora_A, layer.lora_B)}
    for name, parameter in model.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            # Not around the yield: the caller's own mode would be another until the next weight.
            with torch.no_grad():
                weight = layer.merged_weight()
            yield name, weight
        elif id(parameter) not in pairs:
            yield name, parameter.detach()


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
    """The weights that learn, in the model's order: what an optimizer is made for, and steps."""
    return nn.ParameterList(weight for weight in model.parameters() if weight.requires_grad)


def _linears(model: Model) -> dict[str, Linear]:
    """The layers that an adapter can stand beside: the head's product is not made by the head itself.

    Raises:
        ModelError: the model has an adapter.
    """
    if adapted_layers(model):
        raise ModelError("the model has an adapter already; merge it first")
    head = model.get_output_embeddings()
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))
    return {name: layer for name, layer in linears if layer is not head}


def _targeted(model: Model, targets: Sequence[str]) -> dict[str, Linear]:
    """The layers that targets name, in the model's order."""
    linears = _linears(model)
    if list(targets) == [ALL_LINEAR]:
        return linears
    if not targets:
        raise ModelError(f"adapter targets are empty; name layers or write {ALL_LINEAR}")
    chosen: set[str] = set()
    for target in targets:
        found = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}") and target]
        wrong = [name for name in found if name not in linears]
        if wrong or not found:
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            why = f"means {wrong[0]}, which an adapter cannot stand beside" if wrong else "is no layer"
            raise ModelError(f"adapter target {target!r} {why}; this model has: {there}")
        chosen.update(found)
    return {name: layer for name, layer in linears.items() if name in chosen}


def _read_config(path: Path, base: str) -> dict[str, Any]:
    """The fields of a peft configuration, if they mean a plain LoRA adapter for this base."""
    try:
        fields = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except OSError:
        raise ModelError(f"adapter folder {path} has no {CONFIG}") from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ModelError(f"adapter {path}: {CONFIG} is damaged; it must hold one JSON object")
    if fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type")
        raise ModelError(f"adapter {path} is of peft_type {kind!r}; millrace trains LORA alone")
    if type(fields.get("r")) is not int or fields["r"] < 1:
        raise ModelError(f"adapter {path} has r {fields.get('r')!r}; a rank is at least 1")
    alpha = fields.get("lora_alpha")
    if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ModelError(f"adapter {path} has lora_alpha {alpha!r}; it must be a number above 0")
    others = {key: value for key, value in fields.items() if key not in _READ | _IDLE and value}
    harmless = {"init_lora_weights": _INITS, "bias": ("none",)}
    others = {key: value for key, value in others.items() if value not in harmless.get(key, ())}
    if others:
        key, value = min(others.items())
        raise ModelError(
            f"adapter {path} sets {key} to {value!r}, which millrace does not do; merge it with peft into a "
            "model folder and set model.path to that"
        )
    made_for = fields.get("base_model_name_or_path") or ""
    if made_for and base and PurePath(made_for).name != PurePath(base).name:
        raise ModelError(
            f"adapter {path} was made for base {made_for} and the model is {base}; if they are the same, set "
            f"base_model_name_or_path in {CONFIG} to null"
        )
    return fields


def _check_pair(path: Path, name: str, pair: dict[str, Tensor], layer: Linear, rank: int) -> None:
    """Refuse a pair that does not fit its layer."""
    for which, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
        if which not in pair:
            raise ModelError(f"adapter {path} lacks lora_{which} of layer {name}")
        if tuple(pair[which].shape) != shape:
            raise ModelError(
                f"adapter {path} was made for another base: lora_{which} of layer {name} is "
                f"{tuple(pair[which].shape)}, and this model makes it {shape}"
            )
