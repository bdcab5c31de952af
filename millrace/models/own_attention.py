"""Attention of older decoders, which compute it themselves and have no interface for another.

Ours take the place of transformers' classes of attention, with the same modules and weights; if another
implementation is set they compute as in transformers.

T = tokens, H = query heads, K = head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from millrace.models.alibi import COLUMNS, Columns, linear_columns, rounded_columns, with_columns
from millrace.models.attention import NAME, attention
from millrace.models.facts import RECORDED, carried_context


@cache
def adopt(model_type: str) -> None:
    """Let models of this type use millrace's attention; idempotent."""
    if model_type not in MAKERS:
        return
    file = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    replace, models = MAKERS[model_type]
    replace(file)
    # transformers looks into the file's text, and finds that the implementation cannot be changed.
    getattr(file, models)._can_set_attn_implementation_cached_value = True


def plain_implementation(config: PretrainedConfig) -> str:
    """Return the implementation of transformers' own attention that ours is compared with.

    That is the eager one, except of Falcon: its eager attention adds ALiBi twice, once as a part of the mask.
    """
    return "sdpa" if config.model_type == "falcon" else "eager"


def _ours(module: Any) -> bool:
    return module.config._attn_implementation in (NAME, RECORDED)


def _gptj(file: Any) -> None:
    class GPTJAttention(file.GPTJAttention):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            if not _ours(self):
                return super()._attn(query, key, value, attention_mask)
            return _by_head(self, query, key, value, attention_mask, scaling=1 / float(self.scale_attn))

    _add(file.GPTJ_ATTENTION_CLASSES, GPTJAttention)


def _gpt_neo(file: Any) -> None:
    class GPTNeoSelfAttention(file.GPTNeoSelfAttention):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            if not _ours(self):
                return super()._attn(query, key, value, attention_mask)
            # The model's mask ignores windows: they are applied here.
            window = self.config.window_size if self.attention_type == "local" else None
            return _by_head(self, query, key, value, None, scaling=1.0, sliding_window=window)

    _add(file.GPT_NEO_ATTENTION_CLASSES, GPTNeoSelfAttention)


def _falcon(file: Any) -> None:
    class FalconAttention(file.FalconAttention):
        def forward(
            self,
            hidden_states: Tensor,
            alibi: Tensor | None,
            attention_mask: Tensor | None,
            position_ids: Tensor | None = None,
            layer_past: Any = None,
            position_embeddings: Any = None,
            **kwargs: Any,
        ) -> Any:
            if not _ours(self):
                given = {"layer_past": layer_past, "position_embeddings": position_embeddings}
                return super().forward(hidden_states, alibi, attention_mask, position_ids, **given, **kwargs)
            heads = self._split_heads(self.query_key_value(hidden_states))
            query, key, value = (x.transpose(1, 2) for x in heads)
            if self.config.alibi:
                scale = self.inv_norm_factor
                out = _biased(
                    self, (query, key, value), layer_past, attention_mask, scale=scale, columns=self._columns
                )
                return self.dense(out.flatten(2)), None
            query, key = file.apply_rotary_pos_emb(query, key, *position_embeddings)
            if layer_past is not None:
                key, value = layer_past.update(key, value, self.layer_idx)
            out, _ = attention(self, query, key, value, attention_mask, context=kwargs.get("context"))
            return self.dense(out.flatten(2)), None

        def _columns(self, position_T: Tensor, dtype: torch.dtype) -> Columns:
            # transformers has slopes and biases in bfloat16 whatever the model's dtype is.
            pair_12 = torch.ones(1, 2, dtype=torch.long, device=position_T.device)
            slope_H = file.build_alibi_tensor(pair_12, self.num_heads, torch.bfloat16)[:, 0, 1]
            return rounded_columns(slope_H[:, None] * position_T, dtype=dtype)

    def uses_alibi(model: Any) -> bool:
        # Ours adds it, by each token's position and not by the place in the row.
        return model.config.alibi and not _ours(model)

    _add(file.FALCON_ATTENTION_CLASSES, FalconAttention)
    file.FalconModel.use_alibi = property(uses_alibi, lambda model, value: None)


def _bloom(file: Any) -> None:
    class BloomAttention(file.BloomAttention):
        def __init__(self, config: PretrainedConfig, layer_idx: int | None = None) -> None:
            super().__init__(config, layer_idx)
            self.config = config

        def forward(
            self,
            hidden_states: Tensor,
            residual: Tensor,
            alibi: Tensor,
            attention_mask: Tensor | None,
            layer_past: Any = None,
            **kwargs: Any,
        ) -> Any:
            if not _ours(self):
                return super().forward(hidden_states, residual, alibi, attention_mask, layer_past, **kwargs)
            heads, scale = self._reshape(self.query_key_value(hidden_states)), self.inv_norm_factor
            out = _biased(self, heads, layer_past, attention_mask, scale=scale, columns=self._columns)
            out = self.dense(out.flatten(2))
            return file.dropout_add(out, residual, self.hidden_dropout, self.training), None

        def _columns(self, position_T: Tensor, dtype: torch.dtype) -> Columns:
            slope_H = file._get_alibi_slopes(self.num_heads, position_T.device)
            return linear_columns(position_T, slope_H, scale=self.inv_norm_factor, dtype=dtype)

    file.BloomAttention = BloomAttention


def _mpt(file: Any) -> None:
    class MptAttention(file.MptAttention):
        def __init__(self, config: PretrainedConfig, layer_idx: int | None = None) -> None:
            super().__init__(config, layer_idx)
            self.config = config

        def forward(
            self,
            hidden_states: Tensor,
            position_bias: Tensor,
            past_key_values: Any = None,
            attention_mask: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            if not _ours(self):
                return super().forward(
                    hidden_states, position_bias, past_key_values, attention_mask, **kwargs
                )
            mixed = self.Wqkv(hidden_states)
            if self.clip_qkv:
                mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
            parts = (x.unflatten(2, (self.n_heads, self.head_dim)) for x in mixed.chunk(3, dim=2))
            query, key, value = (x.transpose(1, 2) for x in parts)
            heads, scale = (query, key, value), self.softmax_scale
            out = _biased(self, heads, past_key_values, attention_mask, scale=scale, columns=self._columns)
            return self.out_proj(out.flatten(2)), None

        def _columns(self, position_T: Tensor, dtype: torch.dtype) -> Columns:
            # The biases of two positions, of which the last is 0.
            slope_H = -file.build_mpt_alibi_tensor(self.n_heads, 2, device=position_T.device)[:, 0, 0]
            return linear_columns(position_T, slope_H, scale=self.softmax_scale, dtype=dtype)

    theirs = file.create_causal_mask

    def create_causal_mask(*args: Any, **kwargs: Any) -> Any:
        mask = theirs(*args, **kwargs)
        return _NoMask() if mask is None else mask

    file.MptAttention, file.create_causal_mask = MptAttention, create_causal_mask


class _NoMask:
    """The mask of an MPT where transformers makes none, which the model converts nevertheless."""

    def to(self, dtype: torch.dtype) -> None:
        """Return None."""


def _biased(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    view: Any,
    mask: Tensor | None,
    *,
    scale: float,
    columns: Callable[[Tensor, torch.dtype], Columns],
) -> Tensor:
    """Attend with ALiBi, [1, T, H, K]; positions and context are those of the cache's view."""
    query, key, value = heads
    if view is None:
        return attention(module, query, key, value, mask)[0]
    key, value = view.update(key, value, module.layer_idx)
    context = carried_context(key)
    made = view.once((scale, query.shape[1], query.dtype), lambda at_T: columns(at_T, query.dtype))
    query, key, value = with_columns((query, key, value), made)
    out, _ = attention(module, query, key, value, mask, context=context, scaling=scale)
    return out[..., :-COLUMNS]


def _by_head(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    out, weights = attention(module, query, key, value, mask, **options)
    return out.transpose(1, 2), weights


def _add(known: dict[str, Any], ours: Any) -> None:
    known[NAME] = known[RECORDED] = ours


# What replaces the attention of a model type, and the class of its models.
MAKERS: dict[str, tuple[Callable[[Any], None], str]] = {
    "bloom": (_bloom, "BloomPreTrainedModel"),
    "falcon": (_falcon, "FalconPreTrainedModel"),
    "gpt_neo": (_gpt_neo, "GPTNeoPreTrainedModel"),
    "gptj": (_gptj, "GPTJPreTrainedModel"),
    "mpt": (_mpt, "MptPreTrainedModel"),
}
