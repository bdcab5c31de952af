"""Our attention function, registered with transformers as `millrace`.

The model is called with `use_cache=False` and one extra keyword, `context`, which transformers passes through
to every layer untouched. It says what this forward is: a packed row of segments (training, scoring, prefill),
the same with its tokens spread over ranks, new tokens of any number of rows over a paged pool (the paged
engine), or one new token per row over a dense cache (the reference engine). Nothing is hidden in module
state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from millrace.kernels.dispatch import paged_attention, store_kv
from millrace.kernels.packed_attention import Segments, cached_attention, packed_attention
from millrace.kernels.paged_attention import PagedRows, new_pool

NAME = "millrace"
# Slots of a block where a packed row is laid out as the paged engine would; the bits do not depend on it.
INVARIANT_BLOCK = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps of each token: a key and a value for each layer and key head."""

    num_layers: int
    num_heads: int
    width: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> CacheShape:
        """The shape that a model's config asks for."""
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(text.num_hidden_layers, heads, width)


class DenseCache:
    """Keys and values of every layer for a rectangle of rows and slots.

    Shapes: [layers] of [B, J, C, K], B rows, J key heads, C slots, K head width.
    """

    def __init__(self, config: PretrainedConfig, *, num_rows: int, num_slots: int, like: Tensor) -> None:
        """Empty caches with the dtype and device of `like`."""
        shape = CacheShape.of(config)
        size = (num_rows, shape.num_heads, num_slots, shape.width)
        self.keys = [torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros_like(key) for key in self.keys]

    def write(self, layer: int, row_N: Tensor, slot_N: Tensor, key_NJK: Tensor, value_NJK: Tensor) -> None:
        """Put token n into its row and slot."""
        self.keys[layer][row_N, :, slot_N] = key_NJK
        self.values[layer][row_N, :, slot_N] = value_NJK

    def take(self, row_M: Tensor, num_slots: int) -> None:
        """Keep these rows in this order (a row may be taken twice), and the first `num_slots` slots."""
        self.keys = [_resized(key.index_select(0, row_M), num_slots) for key in self.keys]
        self.values = [_resized(value.index_select(0, row_M), num_slots) for value in self.values]


def _resized(x_BJCK: Tensor, num_slots: int) -> Tensor:
    missing = num_slots - x_BJCK.shape[2]
    if missing <= 0:
        return x_BJCK[:, :, :num_slots]
    return torch.cat([x_BJCK, x_BJCK.new_zeros(*x_BJCK.shape[:2], missing, x_BJCK.shape[3])], dim=2)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed row; with a cache, its keys and values are written at (`row_T`, `slot_T`) too (prefill).

    With `paged`, the same segments as rows of a pool of their own, a token's bits are those the paged engine
    gives it: the same kernel attends over the same order of keys.
    """

    segments: Segments
    cache: DenseCache | None = None
    row_T: Tensor | None = None
    slot_T: Tensor | None = None
    paged: PagedRows | None = None


class Dealt(ABC):
    """A packed row whose tokens lie on several ranks, which exchange in every layer; see `models.context`."""

    @abstractmethod
    def attend(
        self, query_THK: Tensor, key_TJK: Tensor, value_TJK: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """What the tokens of this rank attend to, [T, H, K]; the options are scale, window and softcap."""


@dataclass(frozen=True, slots=True)
class Decode:
    """One new token per row of the cache, at `position_B`."""

    cache: DenseCache
    position_B: Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """New tokens of any number of rows; their keys and values are written to the pool, then attended over.

    Attributes:
        pools: keys and values of each layer, as `kernels.paged_attention.new_pool` makes them.
        rows: which tokens these are and where each row's keys lie.
        last_B: index of each row's last token, if nobody reads the final hidden states of others: a model may
            then give those alone, in this order. None where all are read.
    """

    pools: Sequence[tuple[Tensor, Tensor]]
    rows: PagedRows
    last_B: Tensor | None = None


class Recorder:
    """Attends to nothing, and keeps what a layer would attend with: for a trial of the layer's own forward.

    Attributes:
        heads: queries [T, H, K], keys and values [T, J, K].
        options: scale, window and softcap.
    """

    def __init__(self) -> None:
        """Nothing is recorded yet."""
        self.heads: tuple[Tensor, ...] = ()
        self.options: dict[str, Any] = {}


Context = Packed | Dealt | Paged | Decode | Recorder


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention layer.

    Args:
        module: the attention layer.
        query: [1, H, T, K], rotary positions applied.
        key: [1, J, T, K].
        value: [1, J, T, K].
        attention_mask: always None: segments and positions say what is seen.
        context: what this forward is.
        scaling: factor of the scores; 1/sqrt(K) if None.
        sliding_window: as in `packed_attention`.
        softcap: likewise.
        kwargs: what transformers passes besides (dropout, position_ids, ...), refused where it would change
            the result.

    Returns:
        [1, T, H, K] and no attention weights.

    Raises:
        ValueError: no context was given, or the layer asks for something this function does not do.
    """
    if context is None:
        raise ValueError(
            "a model loaded by millrace must be called with context=Packed(...), Paged(...) or Decode(...)"
        )
    if attention_mask is not None or kwargs.get("s_aux") is not None or kwargs.get("dropout"):
        raise ValueError(
            f"{type(module).__name__} asks for a mask, attention sinks or dropout, which are not supported"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Not x[0], whose backward fills a tensor with zeros and writes the slope into it.
    query_THK, key_TJK, value_TJK = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap}
    layer: int = module.layer_idx  # type: ignore[assignment]
    return _attended(layer, query_THK, key_TJK, value_TJK, context, options)[None], None


def _attended(
    layer: int,
    query_THK: Tensor,
    key_TJK: Tensor,
    value_TJK: Tensor,
    context: Context,
    options: dict[str, Any],
) -> Tensor:
    """What the tokens of one layer attend to, as the context says, [T, H, K]."""
    if isinstance(context, Recorder):
        context.heads, context.options = (query_THK, key_TJK, value_TJK), options
        return torch.zeros_like(query_THK)
    if isinstance(context, Paged):
        key_PJSK, value_PJSK = context.pools[layer]
        store_kv(key_TJK, value_TJK, key_PJSK, value_PJSK, context.rows.slot_T)
        return paged_attention(query_THK, key_PJSK, value_PJSK, context.rows, **options)
    if isinstance(context, Decode):
        rows = torch.arange(query_THK.shape[0], device=query_THK.device)
        context.cache.write(layer, rows, context.position_B, key_TJK, value_TJK)
        keys, values = context.cache.keys[layer], context.cache.values[layer]
        return cached_attention(query_THK, keys, values, context.position_B, **options)
    if isinstance(context, Dealt):
        return context.attend(query_THK, key_TJK, value_TJK, options)
    if context.cache is not None:
        assert context.row_T is not None and context.slot_T is not None
        context.cache.write(layer, context.row_T, context.slot_T, key_TJK, value_TJK)
    return attend_packed(query_THK, key_TJK, value_TJK, context, options)


def attend_packed(
    query_THK: Tensor, key_TJK: Tensor, value_TJK: Tensor, packed: Packed, options: dict[str, Any]
) -> Tensor:
    """What the tokens of a packed row attend to, [T, H, K]; the options are scale, window and softcap."""
    if packed.paged is None:
        return packed_attention(query_THK, key_TJK, value_TJK, packed.segments, **options)
    out_THK: Tensor = _Invariant.apply(
        query_THK, key_TJK, value_TJK, packed.segments, packed.paged, tuple(options.items())
    )
    return out_THK


def contiguous_rows(length_B: Tensor, *, block_size: int, device: torch.device) -> PagedRows:
    """Segments of a packed row as rows of a pool of their own, block after block.

    Args:
        length_B: tokens of each segment, on the CPU.
        block_size: slots of a block.
        device: where the rows are needed.
    """
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
        pools = new_pool(
            num_blocks, num_heads, INVARIANT_BLOCK, width, dtype=key_TJK.dtype, device=key_TJK.device
        )
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
    """Make `attn_implementation="millrace"` known to transformers; doing so twice is harmless."""
    AttentionInterface.register(NAME, attention)
