"""A decoder layer of an engine's model in few calls, on a CPU.

With a row for each of some dozen requests a layer's products take tens of microseconds, and any other call,
however small, about as long. So where no gradient is recorded and the cache is paged, queries, keys and
values are one product, activations, factors and sums are done by the products that precede them, and one call
norms, turns, stores and attends. Of a prompt the last layer computes all keys and values, and the rest for
its last token alone. Names and parameters stay. A layer takes part only where a trial on random numbers shows
that this is what it computes; any other stays as it is.

T = tokens, B = rows, D = model width, H = query heads, K = head width.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from millrace.kernels import linear as products
from millrace.kernels.decode import attend_new
from millrace.kernels.paged_attention import new_pool
from millrace.models.attention import CacheShape, Paged, Recorder, contiguous_rows
from millrace.models.fused import Linear, RMSNorm, forget_packed, pack

TRIAL_LENGTHS = (3, 1)
BLOCK = 2
NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def prepare(model: PreTrainedModel) -> None:
    """Make a model that will only ever sample quicker: packed weights, and few calls where they are known.

    It costs the memory of its weights once more. Deterministic models and other devices stay as they are.
    """
    first = next(module for module in model.modules() if isinstance(module, Linear))
    if first.tile is not None or first.weight.device.type != "cpu":
        return
    pack(model)
    if first.packed_weight() is None:
        return
    for module in model.modules():
        if _is_layer(module):
            shape = CacheShape.of(model.config)
            options = _computes_alike(module, shape)
            if options is not None:
                module.millrace_ordinary, module.millrace_parts = module.forward, _Parts(module, options)
                module.millrace_width = shape.width
                module.forward = MethodType(_layer, module)
    stack = Stack.of(model)
    if stack is not None:
        model.millrace_stack = stack
    forget_packed(model)  # of the trials, which packed queries, keys and values each alone


class _Parts:
    """The modules of a layer, looked up once; and scale, window and softcap of its attention."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        attention, feed_forward = module.self_attn, module.mlp
        self.number, self.options = attention.layer_idx, options
        self.norms = [getattr(module, name) for name in NORMS]
        self.head_norms = _head_norms(attention)
        self.query, self.key, self.value = [getattr(attention, name) for name in PROJECTIONS]
        self.out, self.gate, self.up = attention.o_proj, feed_forward.gate_proj, feed_forward.up_proj
        self.down = feed_forward.down_proj


class Stack:
    """All layers of a prepared model, from tokens to final hidden states, without the calls around them."""

    def __init__(self, base: Any) -> None:
        """The stack of a base model whose layers are all prepared."""
        self._embed, self._turn, self._norm = base.embed_tokens, base.rotary_emb, base.norm
        self._parts: list[_Parts] = [module.millrace_parts for module in base.layers]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Stack | None:
        """The stack of a model; None where a trial shows that the model computes something else."""
        base: Any = model.base_model
        names = ("embed_tokens", "rotary_emb", "norm", "layers")
        if not all(hasattr(base, name) for name in names) or type(base.norm) is not RMSNorm:
            return None
        if not all(hasattr(module, "millrace_parts") for module in base.layers):
            return None
        stack, shape = cls(base), CacheShape.of(model.config)
        like = base.embed_tokens.weight
        token_T = torch.arange(sum(TRIAL_LENGTHS)) % len(like)
        position_T = torch.cat([torch.arange(length) for length in TRIAL_LENGTHS])
        rows = contiguous_rows(torch.tensor(TRIAL_LENGTHS), block_size=BLOCK, device=like.device)
        if stack._turn(like[None], position_T[None])[0].shape[-1] != shape.width:
            return None
        found = []
        for way in (stack, partial(_ordinary, base)):
            context = Paged([_trial_pool(shape, like) for _ in base.layers], rows)
            found.append(way(token_T, position_T, context))
        return stack if _close(*found) else None

    def __call__(self, token_T: Tensor, position_T: Tensor, context: Paged) -> Tensor:
        """Final hidden states, [T, D], or of the rows' last tokens; see `_computed`."""
        x_TD = self._embed(token_T)
        cos_1TK, sin_1TK = self._turn(x_TD[None], position_T[None])
        for parts in self._parts:
            x_TD = _computed(parts, x_TD, (cos_1TK[0], sin_1TK[0]), context)
        normed: Tensor = self._norm.forward(x_TD)
        return normed


def _ordinary(base: Any, token_T: Tensor, position_T: Tensor, context: Paged) -> Tensor:
    """What the base model itself makes of tokens, [T, D]."""
    given = {"input_ids": token_T[None], "position_ids": position_T[None]}
    hidden: Tensor = base(**given, use_cache=False, context=context).last_hidden_state[0]
    return hidden


def _layer(module: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """A layer's forward; anything but a paged one without gradient is the layer's own.

    So is one that turns a part of each head only: the trial turned all of it.
    """
    context, angles = options.get("context"), options.get("position_embeddings")
    some = angles is not None and angles[0].shape[-1] != module.millrace_width
    if args or angles is None or some or not isinstance(context, Paged) or torch.is_grad_enabled():
        ordinary: Tensor = module.millrace_ordinary(hidden_states, *args, **options)
        return ordinary
    angle_pair = angles[0][0], angles[1][0]
    return _computed(module.millrace_parts, hidden_states[0], angle_pair, context)[None]


def _computed(parts: _Parts, x_TD: Tensor, angles: tuple[Tensor, Tensor], context: Paged) -> Tensor:
    """The sum x + attention(norm x), then x + down(silu(gate(norm x)) * up(norm x)), [T, D].

    The last layer gives only the rows' last tokens, [B, D], where the context says that they are all.
    """
    rows, pools = context.rows, context.pools
    last_B = context.last_B if parts.number == len(pools) - 1 else None
    heads_TN = _heads(parts, parts.norms[0].forward(x_TD))
    norms = parts.head_norms
    factors = (norms[0].weight, norms[1].weight, norms[0].eps) if norms else None
    if last_B is not None:
        rows = rows.last(last_B)
    out_TN = attend_new(heads_TN, angles, pools[parts.number], rows, norms=factors, **parts.options)
    if last_B is not None:
        x_TD, out_TN = x_TD[last_B], out_TN[last_B]
    x_TD = _product(parts.out, out_TN, "add", x_TD)
    normed_TD = parts.norms[1].forward(x_TD)
    gate_TF = _product(parts.gate, normed_TD, "silu")
    mixed_TF = _product(parts.up, normed_TD, "mul", gate_TF)
    return _product(parts.down, mixed_TF, "add", x_TD)


def _product(linear: Linear, x_TD: Tensor, then: products.Then, other: Tensor | None = None) -> Tensor:
    packed = linear.packed_weight()
    assert packed is not None
    return products.packed_linear(x_TD, packed, linear._parameters["bias"], then=then, other=other)


def _heads(parts: _Parts, x_TD: Tensor) -> Tensor:
    """Queries, keys and values of each token, one behind the other, by one product."""
    packed, bias_N = parts.query.packed_weight(parts.key, parts.value), None
    assert packed is not None
    if parts.query.bias is not None:
        bias_N = torch.cat([linear.bias for linear in (parts.query, parts.key, parts.value)])
    return products.packed_linear(x_TD, packed, bias_N)


def _head_norms(attention: nn.Module) -> tuple[RMSNorm, ...]:
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return tuple(norm for norm in norms if norm is not None)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has the parts that `_computed` knows."""
    attention, feed_forward = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    if attention is None or feed_forward is None or not all(hasattr(module, name) for name in NORMS):
        return False
    linears = [getattr(attention, name, None) for name in (*PROJECTIONS, "o_proj")]
    linears += [getattr(feed_forward, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    norms = _head_norms(attention)
    return (
        all(type(linear) is Linear for linear in linears)
        and len({getattr(linear, "bias", None) is None for linear in linears[:3]}) == 1
        and isinstance(getattr(feed_forward, "act_fn", None), (nn.SiLU, SiLUActivation))
        and len(norms) in (0, 2)
        and all(getattr(norm, "form", None) == "llama" for norm in norms)
    )


def _computes_alike(module: Any, shape: CacheShape) -> dict[str, Any] | None:
    """How a layer attends, if the rest of it is what `_computed` computes; None otherwise."""
    weight_ND = module.self_attn.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    # Small, so that what the layer adds is not lost beside it.
    x_TD = torch.randn(sum(TRIAL_LENGTHS), weight_ND.shape[1], generator=generator) * 0.01
    x_TD = x_TD.to(weight_ND.dtype)
    angle_TK = torch.randn(len(x_TD), shape.width // 2, generator=generator).repeat(1, 2)
    angles = angle_TK.cos().to(x_TD.dtype), angle_TK.sin().to(x_TD.dtype)
    rows = contiguous_rows(torch.tensor(TRIAL_LENGTHS), block_size=BLOCK, device=x_TD.device)
    contexts = [Paged([_trial_pool(shape, x_TD)] * (module.self_attn.layer_idx + 1), rows) for _ in range(2)]
    recorder = Recorder()

    def theirs(context: Any) -> Tensor:
        pair = angles[0][None], angles[1][None]
        return module(x_TD[None], position_embeddings=pair, attention_mask=None, context=context)[0]

    try:
        theirs(recorder)
        expected_TD = theirs(contexts[0])
        ours_TD = _computed(_Parts(module, recorder.options), x_TD, angles, contexts[1])
    except (TypeError, ValueError, RuntimeError, AttributeError):  # another signature, other shapes
        return None
    pairs = [(ours_TD - x_TD, expected_TD - x_TD)]
    pairs += [*zip(contexts[1].pools[-1], contexts[0].pools[-1], strict=True)]
    return recorder.options if all(_close(one, other) for one, other in pairs) else None


def _trial_pool(shape: CacheShape, like: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks = sum(-(-length // BLOCK) for length in TRIAL_LENGTHS)
    return new_pool(num_blocks, shape.num_heads, BLOCK, shape.width, dtype=like.dtype, device=like.device)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    difference = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-6)
    return bool(difference < (0.03 if other.dtype == torch.bfloat16 else 1e-4))
