"""Decoder layers of an engine's model in one call, on a CPU.

With a row for each of some dozen requests a layer's products take tens of microseconds, and any other call,
however small, about as long. So where no gradient is recorded and the cache is paged, one call computes a
layer, or all of them (`kernels.decode`), with a packed copy of its weights. Of a prompt the last layer
computes all keys and values, and the rest for its last token alone. Names and parameters stay. A layer takes
part only if a trial on random numbers shows that its results are the same; any other is unchanged.

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

from millrace.kernels.decode import Layers, LayerWeights
from millrace.kernels.paged_attention import new_pool
from millrace.kernels.product_cpu import pack as pack_weights
from millrace.models.attention import Paged, contiguous_rows
from millrace.models.facts import PoolShape, Recorder, backbone, facts_of
from millrace.models.fused import Linear, RMSNorm, forget_packed, pack
from millrace.models.logprobs import output_head

TRIAL_LENGTHS = (3, 1)
BLOCK = 2
NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def prepare(model: PreTrainedModel) -> None:
    """Speed up a model that is only used for sampling: packed weights, and few calls for supported layers.

    It doubles the memory of the weights. Deterministic models and other devices stay as they are; a model
    sharded by tensor parallelism gets packed weights alone, since the one call has no collectives.
    """
    first = next(module for module in model.modules() if isinstance(module, Linear))
    if first.tile is not None or first.weight.device.type != "cpu":
        return
    pack(model)
    if first.packed_weight() is None:
        return
    shape = facts_of(model).uniform
    if shape is None or output_head(model).group is not None:
        return
    for module in model.modules():
        if _is_layer(module):
            options = _computes_alike(module, shape)
            if options is not None:
                module.millrace_ordinary, module.millrace_parts = module.forward, _Parts(module, options)
                module.millrace_chain = _Chain([module.millrace_parts])
                module.millrace_width = shape.key_width
                module.forward = MethodType(_layer, module)
                module.forget_packed = module.millrace_chain.forget
    stack = Stack.of(model, shape)
    if stack is not None:
        model.millrace_stack, model.forget_packed = stack, stack.forget
    forget_packed(model)  # of the trials, which packed queries, keys and values each alone


class _Parts:
    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        attention, feed_forward = module.self_attn, module.mlp
        (self.number,), self._options = attention.millrace_layer.pools, options
        self._norms = [getattr(module, name) for name in NORMS]
        self._head_norms = _head_norms(attention)
        heads = [getattr(attention, name) for name in PROJECTIONS]
        pair = [feed_forward.gate_proj, feed_forward.up_proj]
        self._linears = [heads, [attention.o_proj], pair, [feed_forward.down_proj]]
        modules = [*self._norms, *self._head_norms, *(linear for some in self._linears for linear in some)]
        self._parameters = [module._parameters for module in modules]
        self._known: tuple[Any, LayerWeights | None] = (None, None)

    def weights(self) -> LayerWeights:
        # Called for each layer of each step; module attributes would need lookups in three dictionaries.
        found = [x for some in self._parameters for x in some.values() if x is not None]
        key = [(x.data_ptr(), x._version) for x in found]
        known, weights = self._known
        if weights is None or known != key:
            weights = self._packed()
            self._known = key, weights
        return weights

    def _packed(self) -> LayerWeights:
        norms, heads = [[norm.weight.detach() for norm in some] for some in (self._norms, self._head_norms)]
        eps = [norm.eps for norm in (*self._norms, *(self._head_norms or self._norms))]
        products = [
            pack_weights(*(linear.weight for linear in some), gated=some is self._linears[2])
            for some in self._linears
        ]
        biases = [
            torch.cat([linear.bias for linear in some]) if some[0].bias is not None else None
            for some in self._linears
        ]
        return LayerWeights(
            (norms[0], norms[1]),
            (heads[0], heads[1]) if heads else None,
            (eps[0], eps[1], eps[2]),
            (products[0], products[1], products[2], products[3]),
            tuple(biases),
            **self._options,
        )

    def forget(self) -> None:
        self._known = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy packs its own weights.
        return {**self.__dict__, "_known": (None, None)}


class _Chain:
    def __init__(self, parts: list[_Parts], norm: RMSNorm | None = None) -> None:
        self._parts, self._norm = parts, norm
        self._known: tuple[Any, Layers | None] = (None, None)

    def layers(self) -> Layers:
        weights, norm = [parts.weights() for parts in self._parts], self._norm
        norm_D, eps = (None, 0.0) if norm is None else (norm.weight.detach(), norm.eps)
        key = [*map(id, weights), None if norm_D is None else norm_D.data_ptr()]
        known, layers = self._known
        if layers is None or known != key:
            layers = Layers(weights, norm_D, eps=eps)
            self._known = key, layers
        return layers

    def forget(self) -> None:
        self._known = (None, None)
        for parts in self._parts:
            parts.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": (None, None)}


class Stack:
    """All layers of a prepared model, from tokens to final hidden states, without the calls around them."""

    def __init__(self, base: Any) -> None:
        self._embed, self._turn = base.embed_tokens, base.rotary_emb
        self._chain = _Chain([module.millrace_parts for module in base.layers], base.norm)
        self._angles: list[Tensor] = []

    @classmethod
    def of(cls, model: PreTrainedModel, shape: PoolShape) -> Stack | None:
        """Return the stack of a model if all pools have this shape; None where it computes something else."""
        base = backbone(model)
        names = ("embed_tokens", "rotary_emb", "norm", "layers")
        if not all(hasattr(base, name) for name in names) or getattr(base.norm, "form", None) != "llama":
            return None
        if not all(hasattr(module, "millrace_parts") for module in base.layers):
            return None
        stack = cls(base)
        like = base.embed_tokens.weight
        token_T = torch.arange(sum(TRIAL_LENGTHS)) % len(like)
        position_T = torch.cat([torch.arange(length) for length in TRIAL_LENGTHS])
        rows = contiguous_rows(torch.tensor(TRIAL_LENGTHS), block_size=BLOCK, device=like.device)
        if stack._turn(like[None], position_T[None])[0].shape[-1] != shape.key_width:
            return None
        found = []
        for way in (stack, partial(_ordinary, base)):
            context = Paged([_trial_pool(shape, like) for _ in base.layers], rows)
            found.append(way(token_T, position_T, context))
        return stack if _close(*found) else None

    def __call__(self, token_T: Tensor, position_T: Tensor, context: Paged) -> Tensor:
        """Final hidden states, [T, D], or of the rows' last tokens if the context has `last_B`."""
        x_TD, length = self._embed(token_T), context.rows.max_length
        if not self._angles or len(self._angles[0]) < length:
            position_1L = torch.arange(1 << length.bit_length())[None]
            self._angles = [angle_1LK[0].contiguous() for angle_1LK in self._turn(x_TD[None], position_1L)]
        cos_TK, sin_TK = [angle_LK.index_select(0, position_T) for angle_LK in self._angles]
        return self._chain.layers()(x_TD, (cos_TK, sin_TK), context.pools, context.rows, context.last_B)

    def forget(self) -> None:
        """Free the packed weights."""
        self._chain.forget()


def _ordinary(base: Any, token_T: Tensor, position_T: Tensor, context: Paged) -> Tensor:
    given = {"input_ids": token_T[None], "position_ids": position_T[None]}
    hidden: Tensor = base(**given, use_cache=False, context=context).last_hidden_state[0]
    return hidden


def _layer(module: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute a layer; of no paged forward, with gradient or of a part of each head, as the layer's own."""
    context, angles = options.get("context"), options.get("position_embeddings")
    some = angles is not None and angles[0].shape[-1] != module.millrace_width
    if args or angles is None or some or not isinstance(context, Paged) or torch.is_grad_enabled():
        ordinary: Tensor = module.millrace_ordinary(hidden_states, *args, **options)
        return ordinary
    number: int = module.millrace_parts.number
    # The last layer computes only the rows' last tokens if the context has `last_B`.
    last_B = context.last_B if number == len(context.pools) - 1 else None
    layers, pools = module.millrace_chain.layers(), context.pools[number : number + 1]
    return layers(hidden_states[0], (angles[0][0], angles[1][0]), pools, context.rows, last_B)[None]


def _head_norms(attention: nn.Module) -> tuple[RMSNorm, ...]:
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return tuple(norm for norm in norms if norm is not None)


def _is_layer(module: nn.Module) -> bool:
    attention, feed_forward = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    if attention is None or feed_forward is None or not all(hasattr(module, name) for name in NORMS):
        return False
    linears: list[Any] = [getattr(attention, name, None) for name in (*PROJECTIONS, "o_proj")]
    linears += [getattr(feed_forward, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    norms = _head_norms(attention)
    every = [*norms, *(getattr(module, name) for name in NORMS)]
    return (
        all(type(linear) is Linear for linear in linears)
        and len({linear.bias is None for linear in linears[:3]}) == 1
        and len({linear.bias is None for linear in linears[4:6]}) == 1
        and isinstance(getattr(feed_forward, "act_fn", None), (nn.SiLU, SiLUActivation))
        and len(norms) in (0, 2)
        and all(getattr(norm, "form", None) == "llama" for norm in every)
    )


def _computes_alike(module: Any, shape: PoolShape) -> dict[str, Any] | None:
    weight_ND = module.self_attn.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    # Small, so that what the layer adds is not lost beside it.
    x_TD = torch.randn(sum(TRIAL_LENGTHS), weight_ND.shape[1], generator=generator) * 0.01
    x_TD = x_TD.to(weight_ND.dtype)
    angle_TK = torch.randn(len(x_TD), shape.key_width // 2, generator=generator).repeat(1, 2)
    angles = angle_TK.cos().to(x_TD.dtype), angle_TK.sin().to(x_TD.dtype)
    rows = contiguous_rows(torch.tensor(TRIAL_LENGTHS), block_size=BLOCK, device=x_TD.device)
    recorder = Recorder()

    def theirs(context: Any) -> Tensor:
        pair = angles[0][None], angles[1][None]
        return module(x_TD[None], position_embeddings=pair, attention_mask=None, context=context)[0]

    try:
        theirs(recorder)
        options = {name: value for name, value in recorder.calls[-1].options.items() if name != "chunk"}
        parts = _Parts(module, options)
        contexts = [Paged([_trial_pool(shape, x_TD)] * (parts.number + 1), rows) for _ in range(2)]
        expected_TD = theirs(contexts[0])
        layers, pools = _Chain([parts]).layers(), contexts[1].pools[-1:]
        ours_TD = layers(x_TD, angles, pools, rows)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # another signature, other shapes
        return None
    pairs = [(ours_TD - x_TD, expected_TD - x_TD)]
    pairs += [*zip(contexts[1].pools[-1], contexts[0].pools[-1], strict=True)]
    return options if all(_close(one, other) for one, other in pairs) else None


def _trial_pool(shape: PoolShape, like: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks = sum(-(-length // BLOCK) for length in TRIAL_LENGTHS)
    return new_pool(num_blocks, shape.num_heads, BLOCK, shape.key_width, dtype=like.dtype, device=like.device)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    difference = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-6)
    return bool(difference < (0.03 if other.dtype == torch.bfloat16 else 1e-4))
