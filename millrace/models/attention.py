"""Our attention function, registered with transformers as `millrace`.

The model is called with `use_cache=False` and one extra keyword, `context`, which transformers passes through
to every layer untouched. It describes the forward: a packed row of segments (training, scoring), the same
with its tokens sharded over ranks, or new tokens of any number of rows over a paged pool (the paged engine).
A context may also attend itself, as the dense cache of `tests/twins` does. Nothing is hidden in module state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from millrace.kernels.dispatch import paged_attention, store_kv
from millrace.kernels.packed_attention import Segments, packed_attention
from millrace.kernels.paged_attention import PagedRows, new_pool
from millrace.models import facts
from millrace.models.facts import (
    RECORDED,
    Call,
    ContextLost,
    Heads,
    LayerFacts,
    ModelFacts,
    Recorder,
    carried_context,
    recorded_limits,
)

NAME = "millrace"
# Slots of a block where a packed row is laid out as the paged engine would; the bits do not depend on it.
INVARIANT_BLOCK = 16
# How often each layer that attends several times has done so in a forward.
Turns = dict[str, int]


# Further keywords that a layer may pass. None changes the attention: they repeat what positions, segments and
# masks define, or request outputs that are not read.
HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "handed",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed row; with `paged`, the same segments as rows of a pool of their own.

    Then a token has the bits that the paged engine gives it: the same kernel attends over the same order of
    keys.
    """

    segments: Segments
    paged: PagedRows | None = None


class AttendingContext(ABC):
    """A context that computes attention itself, such as a row sharded over ranks (`distributed.context`)."""

    @abstractmethod
    def attend(self, of_layer: LayerFacts, heads: Heads, options: dict[str, Any]) -> Tensor:
        """Attend with this rank's queries, [T, H, V]; options are scale, window, softcap and chunk."""


@dataclass(frozen=True, slots=True)
class Paged:
    """New tokens of any number of rows; their keys and values are written to the pool, then attended over.

    With `last_B`, the index of each row's last token, a model may return only the final hidden states of
    those, in this order. Layers that attend several times count in `turns`.
    """

    pools: Sequence[tuple[Tensor, Tensor]]
    rows: PagedRows
    last_B: Tensor | None = None
    turns: Turns = field(default_factory=dict)


Context = Packed | AttendingContext | Paged | Recorder


def new_pools(
    facts: ModelFacts, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Allocate empty pools of keys and values."""
    return [
        new_pool(
            num_blocks,
            shape.num_heads,
            block_size,
            shape.key_width,
            shape.value_width,
            dtype=dtype,
            device=device,
        )
        for shape in facts.pools
    ]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: Context | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, [1, T, H, V], without attention weights; transformers calls this in each layer.

    The query [1, H, T, K] and key [1, J, T, K] have rotary positions applied; the value is [1, J, T, V]. The
    scores' factor is 1/sqrt(K) if `scaling` is None. A recorded mask takes precedence over `sliding_window`.
    `attention_mask` is None except while a model is recorded.

    Raises:
        ValueError: no context was given, the layer was not recorded, dropout is not 0, attention is not
            causal, or it needs an unsupported feature (a keyword that is neither None nor `HARMLESS`).
    """
    context = carried_context(key) if context is None else context
    if context is None:
        raise ContextLost("a model loaded by millrace must be called with context=Packed(...) or Paged(...)")
    _refuse_unknown(module, {**kwargs, "dropout": dropout or None, "is_causal": is_causal in (None, True)})
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Not x[0]: its backward fills a tensor with zeros and writes the gradient into it.
    query_THK, key_TJK, value_TJV = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": softcap, "chunk": None}
    of_layer: LayerFacts | None = getattr(module, "millrace_layer", None)
    if isinstance(context, Recorder):
        if of_layer is not None:
            options |= {"window": of_layer.window, "chunk": of_layer.chunk}
        options |= recorded_limits(module, attention_mask) or {}
        context.calls.append(Call(module, (query_THK, key_TJK, value_TJV), options))
        return query.new_zeros(1, *query_THK.shape[:2], value.shape[-1]), None
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} gives attention a mask of its own, which no kernel takes")
    if of_layer is None:
        raise ValueError(f"this {type(module).__name__} was not recorded; load its model by millrace.models")
    options |= {"window": of_layer.window, "chunk": of_layer.chunk}
    return _attended(of_layer, (query_THK, key_TJK, value_TJV), context, options)[None], None


# Meaning of the keywords that change a result, for the error message.
REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of blocks of keys",
    "position_bias": "a bias by position",
}


def _refuse_unknown(module: nn.Module, given: dict[str, Any]) -> None:
    known_causal = given.pop("is_causal")
    unknown = [name for name, value in given.items() if value is not None and name not in HARMLESS]
    unknown = sorted(f"{name} ({REFUSED[name]})" if name in REFUSED else name for name in unknown)
    if not known_causal:
        unknown.append("is_causal=False")
    if unknown:
        raise ValueError(
            f"{type(module).__name__} gives attention {' and '.join(unknown)}, which no kernel of millrace "
            "takes"
        )


def _attended(
    of_layer: LayerFacts,
    heads: Heads,
    context: Packed | AttendingContext | Paged,
    options: dict[str, Any],
) -> Tensor:
    if isinstance(context, Paged):
        query_THK, key_TJK, value_TJV = heads
        key_PJSK, value_PJSV = context.pools[pool_of(of_layer, context.turns)]
        if of_layer.writes:
            store_kv(key_TJK, value_TJV, key_PJSK, value_PJSV, context.rows.slot_T)
        return paged_attention(query_THK, key_PJSK, value_PJSV, context.rows, **options)
    if isinstance(context, AttendingContext):
        return context.attend(of_layer, heads, options)
    return attend_packed(heads, context, options)


def pool_of(of_layer: LayerFacts, turns: Turns) -> int:
    """Return the pool that the layer's next call of attention reads, and count the call in `turns`."""
    if len(of_layer.pools) == 1:
        return of_layer.pools[0]
    turn = turns.get(of_layer.name, 0)
    turns[of_layer.name] = (turn + 1) % len(of_layer.pools)
    return of_layer.pools[turn]


def attend_packed(heads: Heads, packed: Packed, options: dict[str, Any]) -> Tensor:
    """Attend within a packed row, [T, H, V]; the options are scale, window, softcap and chunk."""
    if packed.paged is None:
        return packed_attention(*heads, packed.segments, **options)
    out_THK: Tensor = _Invariant.apply(*heads, packed.segments, packed.paged, tuple(options.items()))
    return out_THK


def contiguous_rows(length_B: Tensor, *, block_size: int, device: torch.device) -> PagedRows:
    """Lay out segments (lengths on the CPU) as rows of a pool of their own on `device`, block after block."""
    blocks_B = -(-length_B // block_size)
    first_block_B = blocks_B.cumsum(0) - blocks_B
    first_B = length_B.cumsum(0) - length_B
    slot_T = torch.arange(int(length_B.sum())) + (first_block_B * block_size - first_B).repeat_interleave(
        length_B
    )
    block_BC = first_block_B[:, None] + torch.arange(int(blocks_B.max()))
    return PagedRows(
        block_BC=block_BC.to(device, torch.int32),
        start_B=torch.zeros_like(length_B).to(device),
        first_B=first_B.to(device),
        count_B=length_B.to(device),
        slot_T=slot_T.to(device),
        max_count=int(length_B.max()),
        max_length=int(length_B.max()),
        exact=True,
    )


class _Invariant(torch.autograd.Function):
    """Attention over a packed row by the paged kernel; the backward is that of `packed_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THK: Tensor,
        key_TJK: Tensor,
        value_TJK: Tensor,
        segments: Segments,
        rows: PagedRows,
        options: tuple[tuple[str, Any], ...],
    ) -> Tensor:
        ctx.save_for_backward(query_THK, key_TJK, value_TJK)
        ctx.segments, ctx.options = segments, dict(options)
        num_blocks = int(-(-rows.count_B // INVARIANT_BLOCK).sum())
        _, num_heads, width = key_TJK.shape
        size = (num_blocks, num_heads, INVARIANT_BLOCK, width, value_TJK.shape[2])
        pools = new_pool(*size, dtype=key_TJK.dtype, device=key_TJK.device)
        store_kv(key_TJK.detach(), value_TJK.detach(), *pools, rows.slot_T)
        return paged_attention(query_THK.detach(), *pools, rows, **ctx.options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query_THK, key_TJK, value_TJK = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        inputs = (query_THK, key_TJK, value_TJK)
        with torch.enable_grad():
            out_THK = packed_attention(query_THK, key_TJK, value_TJK, ctx.segments, **ctx.options)
        return *torch.autograd.grad(out_THK, inputs, gradients[0]), None, None, None


def register() -> None:
    """Register `attn_implementation="millrace"` with transformers; idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(RECORDED, attention)
    facts.register()
