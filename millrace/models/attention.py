"""Our attention function, registered with transformers as `millrace`.

The model is called with `use_cache=False` and one extra keyword, `context`, which transformers passes through
to every layer untouched. It says what this forward is: a packed row of segments (training, scoring, prefill),
or one new token per row over a dense cache (decode). Nothing is hidden in module state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from millrace.kernels.packed_attention import Segments, cached_attention, packed_attention

NAME = "millrace"


class DenseCache:
    """Keys and values of every layer for a rectangle of rows and slots.

    Shapes: [layers] of [B, J, C, K], B rows, J key heads, C slots, K head width.
    """

    def __init__(self, config: PretrainedConfig, *, num_rows: int, num_slots: int, like: Tensor) -> None:
        """Empty caches with the dtype and device of `like`."""
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        shape = (num_rows, heads, num_slots, width)
        self.keys = [
            torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(text.num_hidden_layers)
        ]
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
    """A packed row; with a cache, its keys and values are written at (`row_T`, `slot_T`) too (prefill)."""

    segments: Segments
    cache: DenseCache | None = None
    row_T: Tensor | None = None
    slot_T: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """One new token per row of the cache, at `position_B`."""

    cache: DenseCache
    position_B: Tensor


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: Packed | Decode | None = None,
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
        raise ValueError("a model loaded by millrace must be called with context=Packed(...) or Decode(...)")
    if attention_mask is not None or kwargs.get("s_aux") is not None or kwargs.get("dropout"):
        raise ValueError(
            f"{type(module).__name__} asks for a mask, attention sinks or dropout, which are not supported"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query_THK, key_TJK, value_TJK = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap}
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(context, Decode):
        rows = torch.arange(query_THK.shape[0], device=query.device)
        context.cache.write(layer, rows, context.position_B, key_TJK, value_TJK)
        keys, values = context.cache.keys[layer], context.cache.values[layer]
        return cached_attention(query_THK, keys, values, context.position_B, **options)[None], None
    if context.cache is not None:
        assert context.row_T is not None and context.slot_T is not None
        context.cache.write(layer, context.row_T, context.slot_T, key_TJK, value_TJK)
    return packed_attention(query_THK, key_TJK, value_TJK, context.segments, **options)[None], None


def register() -> None:
    """Make `attn_implementation="millrace"` known to transformers; doing so twice is harmless."""
    AttentionInterface.register(NAME, attention)
