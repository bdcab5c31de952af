"""Attention and feed-forward of an engine's model in few calls, on a CPU.

With a row for each of some dozen requests a layer's products take tens of microseconds, and any other call,
however small, about as long. So where no gradient is recorded and the cache is paged, one product gives
queries, keys and values, one pass norms and turns them, and one product gives both halves of a feed-forward.
Names and parameters stay. A module takes part only where a trial on random numbers shows that it computes
just this; any other stays as it is.

T = tokens, D = model width, H = query heads, J = key heads, K = head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from millrace.kernels import linear as products
from millrace.kernels.decode import gated, norm_rotate
from millrace.kernels.dispatch import paged_attention, store_kv
from millrace.models.attention import Paged, Recorder
from millrace.models.fused import PACKED_ROWS, Linear, RMSNorm, pack

# With more rows torch's own work, which it spreads over threads, is quicker than one pass on one.
FEW_ROWS = 128
TRIAL_ROWS = 5
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
HALVES = ("gate_proj", "up_proj")


class Joint:
    """Linear layers side by side as one packed weight, made anew when one of theirs was written or moved."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        """Nothing is packed yet."""
        self.layers = list(layers)
        self._key: Any = None
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Compute x W^T + b of all layers, side by side."""
        key = tuple((layer.weight.data_ptr(), layer.weight._version) for layer in self.layers)
        if key != self._key:
            weight_ND = torch.cat([layer.weight.detach() for layer in self.layers])
            given: list[Tensor | None] = [layer.bias for layer in self.layers]
            biases = [bias.detach() for bias in given if bias is not None]
            self._bias = torch.cat(biases) if biases else None
            self._packed = products.pack(weight_ND, num_rows=PACKED_ROWS)
            self._key = key
        assert self._packed is not None
        return products.packed_linear(x_TD, self._packed, self._bias)

    def forget(self) -> None:
        """Give the packed weight's memory back; it is made again when it is next needed."""
        self._key, self._packed = None, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Joint:
        # A copy packs weights of its own.
        return Joint([memo.get(id(layer), layer) for layer in self.layers])


@torch.no_grad()
def prepare(model: PreTrainedModel) -> None:
    """Make a model that will only ever sample quicker: packed weights, and few calls where they are known.

    It costs the memory of its weights once more. Deterministic models and other devices stay as they are.
    """
    first = next(module for module in model.modules() if isinstance(module, Linear))
    if first.tile is not None or first.weight.device.type != "cpu":
        return
    pack(model)
    if first.weight.dtype == torch.float64 or products.pack(first.weight, num_rows=PACKED_ROWS) is None:
        return
    for module in model.modules():
        children = dict(module.named_children())
        if set(PROJECTIONS) <= children.keys() and all(type(children[n]) is Linear for n in PROJECTIONS):
            options = _attends_alike(module)
            if options is not None:
                _replace(module, _attention, Joint([children[n] for n in PROJECTIONS]), options)
        elif set(HALVES) <= children.keys() and isinstance(children.get("act_fn"), (nn.SiLU, SiLUActivation)):
            joint = Joint([children[name] for name in HALVES])
            if _is_gated_alike(module, joint):
                _replace(module, _feed_forward, joint, {})


def forget_packed(model: PreTrainedModel) -> None:
    """Give the memory of all packed weights back; they are made again when they are next needed."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.forget_packed()
        joint = getattr(module, "millrace_joint", None)
        if joint is not None:
            joint.forget()


def _replace(module: Any, forward: Any, joint: Joint, options: dict[str, Any]) -> None:
    module.millrace_ordinary = module.forward
    module.millrace_joint, module.millrace_options = joint, options
    module.forward = MethodType(forward, module)


def _attention(
    module: Any, hidden_states: Tensor, position_embeddings: Any = None, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """An attention layer's forward; anything but a paged one without gradient is the layer's own."""
    context = options.get("context")
    if not isinstance(context, Paged) or torch.is_grad_enabled():
        ordinary: tuple[Tensor, None] = module.millrace_ordinary(
            hidden_states, position_embeddings, *args, **options
        )
        return ordinary
    query_THK, key_TJK, value_TJK = _projected(module, hidden_states[0], position_embeddings)
    key_PJSK, value_PJSK = context.pools[module.layer_idx]
    store_kv(key_TJK, value_TJK, key_PJSK, value_PJSK, context.rows.slot_T)
    out_THK = paged_attention(query_THK, key_PJSK, value_PJSK, context.rows, **module.millrace_options)
    return module.o_proj(out_THK.to(hidden_states.dtype).flatten(1)[None]), None


def _projected(module: Any, x_TD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed and turned, and values, all float32."""
    qkv_TN = module.millrace_joint(x_TD).float()
    cos_TK, sin_TK = angles[0][0], angles[1][0]
    width = cos_TK.shape[1]
    norms = _norms(module)
    query_THK, key_TJK = norm_rotate(
        qkv_TN,
        cos_TK,
        sin_TK,
        num_heads=module.q_proj.out_features // width,
        gains=tuple(norm.weight.float() for norm in norms) if norms else None,  # type: ignore[arg-type]
        eps=norms[0].eps if norms else 0.0,
    )
    value_TJK = qkv_TN[:, qkv_TN.shape[1] - key_TJK.shape[1] * width :].unflatten(1, (-1, width))
    return query_THK, key_TJK, value_TJK


def _norms(module: Any) -> tuple[RMSNorm, ...]:
    return tuple(child for name in ("q_norm", "k_norm") if (child := getattr(module, name, None)) is not None)


def _feed_forward(module: Any, x: Tensor) -> Tensor:
    """A gated feed-forward's forward; one with a gradient is the module's own."""
    if torch.is_grad_enabled():
        ordinary: Tensor = module.millrace_ordinary(x)
        return ordinary
    out: Tensor = module.down_proj(_halves(module.millrace_joint, x[0], module.act_fn)[None])
    return out


def _halves(joint: Joint, x_TD: Tensor, act: nn.Module) -> Tensor:
    both_TN = joint(x_TD)
    if len(both_TN) <= FEW_ROWS:
        return gated(both_TN.float()).to(x_TD.dtype)
    gate_TF, up_TF = both_TN.chunk(2, dim=1)
    mixed_TF: Tensor = act(gate_TF).mul_(up_TF)
    return mixed_TF


def _attends_alike(module: Any) -> dict[str, Any] | None:
    """How a layer attends, if its queries, keys and values are what `_projected` makes; None otherwise."""
    weight, width = module.q_proj.weight, getattr(module, "head_dim", 0)
    norms = _norms(module)
    known = len(norms) in (0, 2) and all(getattr(norm, "form", None) == "llama" for norm in norms)
    if not width or not known:
        return None
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(TRIAL_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    angle_TK = torch.randn(TRIAL_ROWS, width // 2, generator=generator).repeat(1, 2)
    angles = angle_TK.cos()[None].to(weight.dtype), angle_TK.sin()[None].to(weight.dtype)
    recorder = Recorder()
    try:
        module(x_TD[None], position_embeddings=angles, attention_mask=None, context=recorder)
        module.millrace_joint = Joint([getattr(module, name) for name in PROJECTIONS])
        ours = _projected(module, x_TD, angles)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # another signature, other shapes
        return None
    if any(one.shape != other.shape for one, other in zip(ours, recorder.heads, strict=True)):
        return None
    alike = all(_close(one, other) for one, other in zip(ours, recorder.heads, strict=True))
    return recorder.options if alike else None


def _is_gated_alike(module: Any, joint: Joint) -> bool:
    """Whether a feed-forward is down(silu(gate x) * up x) and nothing else."""
    weight = module.gate_proj.weight
    x_TD = torch.randn(TRIAL_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    return _close(module.down_proj(_halves(joint, x_TD, module.act_fn)), module(x_TD[None])[0])


def _close(one: Tensor, other: Tensor) -> bool:
    difference = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-3)
    return bool(difference < (0.03 if other.dtype == torch.bfloat16 else 1e-4))
