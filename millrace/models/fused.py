"""Hot modules of a transformers model replaced in place by faster ones, for trainer and engine alike.

Names, shapes and identity of all parameters stay, so saving, loading, tying, copying and optimizers are not
affected. A module is replaced only where a trial shows that ours computes the same; any other stays as it is.

T = tokens, D = model width, K = head width, H = query heads, J = key heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from millrace.kernels import linear as products
from millrace.kernels.norm import FORMS, Form, rms_norm, rms_norm_plain
from millrace.kernels.product_cpu import PackedWeight
from millrace.kernels.rotary import rotate

ROTARY = "apply_rotary_pos_emb"


class Linear(nn.Linear):
    """`nn.Linear` by our products.

    `tile` is the number of rows of one product for batch-invariant results, or None. With `packs`, a packed
    copy of the weight is kept for forwards without gradient.
    """

    tile: int | None
    packs: bool
    _packed: tuple[Any, PackedWeight | None]

    @classmethod
    def adopt(cls, linear: nn.Linear) -> None:
        """Convert a plain linear layer (no subclass) to ours, in place."""
        linear.__class__ = cls
        linear.tile, linear.packs, linear._packed = None, False, (None, None)  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """Compute the product, [..., N]."""
        if self.tile is not None:
            return products.invariant_linear(input, self.weight, self.bias, tile=self.tile)
        return products.linear(input, self.weight, self.bias, packed=self.packed_weight())

    def packed_weight(self) -> PackedWeight | None:
        """Return the packed copy of the current weight; None if none is kept or a gradient is recorded."""
        if not self.packs or torch.is_grad_enabled():
            return None
        key = (self.weight.data_ptr(), self.weight._version)
        if self._packed[0] != key:
            self._packed = key, products.pack(self.weight)
        return self._packed[1]

    def forget_packed(self) -> None:
        """Free the packed copy."""
        self._packed = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy packs its own weight.
        return {**self.__dict__, "_packed": (None, None)}


class RMSNorm(nn.Module):
    """The norm of one architecture by our kernel."""

    def __init__(self, weight_D: nn.Parameter, eps: float, form: Form) -> None:
        super().__init__()
        self.weight = weight_D
        self.eps = eps
        self.form: Form = form

    def forward(self, x: Tensor) -> Tensor:
        """Divide each row by its root mean square, and scale it."""
        return rms_norm(x, self.weight, self.eps, form=self.form)


# torch computes silu and gelu of the last numbers of a block of memory by other instructions than the rest:
# their last bit depends on a row's memory position. That of exp, tanh and erf does not; the rest is exact.
def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + (x / math.sqrt(2)).erf())


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())


INVARIANT_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    SiLUActivation: _silu,
    nn.SiLU: _silu,
    GELUActivation: _gelu,
    GELUTanh: _gelu_tanh,
}


class InvariantActivation(nn.Module):
    """An activation in float32, which gives the same bits at any memory position."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return self.function(x.float()).to(x.dtype) if x.dtype == torch.bfloat16 else self.function(x)


# Each number or row alone, in an order that does not depend on its place.
INVARIANT = (Linear, RMSNorm, nn.LayerNorm, nn.ReLU, nn.Tanh)
ACTIVATION_FILES = ("torch.nn.modules.activation", "transformers.activations")


def fuse(model: PreTrainedModel) -> None:
    """Replace linear layers, norms and rotary positions in place; idempotent."""
    trials: dict[Any, Any] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                Linear.adopt(child)
            elif type(child).__name__.endswith("RMSNorm") and not isinstance(child, RMSNorm):
                form = _once(trials, child, _norm_form)
                if form is not None:
                    setattr(parent, name, RMSNorm(child.weight, _eps(child), form))
    for module in model.modules():
        forward = _once(trials, module, _with_our_rotary)
        if forward is not None:
            module.forward = MethodType(forward, module)


def pack(model: PreTrainedModel) -> None:
    """Keep a packed copy of every linear weight for forwards without gradient: quicker, at twice the memory.

    A copy is made when it is first needed, and anew after its weight was written or moved. A write that
    autograd does not count (through `.data`, or by another process) needs `forget_packed`.
    """
    for module in _linears(model):
        module.packs = module.tile is None


def forget_packed(model: PreTrainedModel) -> None:
    """Free the packed copies; each is made again when it is next needed."""
    for module in model.modules():
        forget: Any = getattr(module, "forget_packed", None)
        if forget is not None:
            forget()


def set_deterministic(model: PreTrainedModel, *, tile: int = 32) -> None:
    """Make every module outside of attention of a fused model batch-invariant, permanently.

    `tile` is the number of rows of one product. The output head's own product is not the model's: call
    `invariant_linear` there, with the same tile.

    Raises:
        ValueError: the tile is below 1, or a module is not known to keep rows apart; nothing is changed then.
    """
    if tile < 1:
        raise ValueError(f"tile is {tile}; a tile must hold at least 1 row")
    for name, module in model.named_modules():
        owns = next(module.parameters(recurse=False), None) is not None
        asked = owns or type(module).__module__ in ACTIVATION_FILES
        # Embeddings of every kind look a row up, and scale it at most.
        known = isinstance(module, nn.Embedding) or type(module) in INVARIANT
        known = known or _invariant_of(module) is not None
        if asked and not known:
            raise ValueError(
                f"module {name} is a {type(module).__name__}, whose rows are not known to be independent of "
                f"the batch; turn deterministic off for {type(model).__name__}"
            )
    for module in _linears(model):
        module.tile, module.packs = tile, False
        module.forget_packed()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            function = _invariant_of(child)
            if function is not None:
                setattr(parent, name, InvariantActivation(function))


def _invariant_of(activation: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the same activation with invariant bits, if it needs one and there is one."""
    if type(activation) is nn.GELU:
        return _gelu_tanh if activation.approximate == "tanh" else _gelu
    return INVARIANT_ACTIVATIONS.get(type(activation))


def _linears(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def _once(trials: dict[Any, Any], module: nn.Module, trial: Callable[[nn.Module], Any]) -> Any:
    key = type(module), trial, tuple(module._parameters)
    if key not in trials:
        trials[key] = trial(module)
    return trials[key]


def _eps(norm: Any) -> float:
    eps: float = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or math.nan
    return eps


def _norm_form(norm: Any) -> Form | None:
    if {name for name, _ in norm.named_parameters()} != {"weight"} or norm.weight.ndim != 1:
        return None
    # In bfloat16 and with any weights, or what is rounded first would not show; small rows, so that eps does.
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(norm).to("cpu", torch.bfloat16).requires_grad_(False)
    trial.weight.copy_(torch.randn(trial.weight.shape, generator=generator))
    x_TD = torch.randn(64, len(trial.weight), generator=generator)
    x_TD = (x_TD * torch.logspace(-4, 1, 64)[:, None]).bfloat16()
    for form in FORMS:
        if torch.equal(trial(x_TD), rms_norm_plain(x_TD, trial.weight, _eps(norm), form=form)):
            return form
    return None


def _with_our_rotary(module: nn.Module) -> Callable[..., Any] | None:
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(ROTARY)
    if theirs is None or forward.__closure__ is not None or not _rotates_alike(theirs):
        return None
    scope = {**forward.__globals__, ROTARY: _rotary(theirs)}
    ours = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _rotary(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        known = query.ndim == 4 and len(query) == 1 and len(cos) == 1 and cos.shape[-1] == query.shape[-1]
        if rest or options or not known or cos.dtype != query.dtype:
            return theirs(query, key, cos, sin, *rest, **options)
        # Not query[0]: its backward fills a tensor with zeros and writes the gradient into it.
        query, key = rotate(*(x.squeeze(0) for x in (query, key, cos, sin)))
        return query[None], key[None]

    return rotary


def _rotates_alike(theirs: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, num_heads, 3, 8, generator=generator) for num_heads in (4, 2))
    cos, sin = torch.randn(2, 1, 3, 8, generator=generator)
    try:
        turned = theirs(query, key, cos, sin)
    except (TypeError, RuntimeError, ValueError):  # another signature, other shapes
        return False
    ours = rotate(query[0], key[0], cos[0], sin[0])
    return all(torch.equal(one[0], other) for one, other in zip(turned, ours, strict=True))
