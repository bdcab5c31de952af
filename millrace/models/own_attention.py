"""Attention of older decoders, which compute it themselves and have no interface for another.

transformers keeps their attention classes in a dictionary by implementation. Ours are added there, with the
same modules and weights; if another implementation is set they compute as in transformers.

T = tokens, H = query heads, K = head width.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from millrace.models.attention import NAME, attention
from millrace.models.facts import RECORDED

# The module of a model type's classes, the class of attention in plain torch, and that of its models.
PLACES = {
    "falcon": ("FALCON_ATTENTION_CLASSES", "FalconAttention", "FalconPreTrainedModel"),
    "gpt_neo": ("GPT_NEO_ATTENTION_CLASSES", "GPTNeoSelfAttention", "GPTNeoPreTrainedModel"),
    "gptj": ("GPTJ_ATTENTION_CLASSES", "GPTJAttention", "GPTJPreTrainedModel"),
}


def adopt(model_type: str) -> None:
    """Let models of this type use millrace's attention; idempotent."""
    if model_type not in PLACES:
        return
    file = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    known, theirs, models = (getattr(file, name) for name in PLACES[model_type])
    if NAME not in known:
        known[NAME] = known[RECORDED] = MAKERS[model_type](theirs, file)
        # transformers looks into the file's text, and finds that the implementation cannot be changed.
        models._can_set_attn_implementation_cached_value = True


def _ours(module: Any) -> bool:
    return module.config._attn_implementation in (NAME, RECORDED)


def _gptj(theirs: Any, file: Any) -> Any:
    class GPTJAttention(theirs):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            if not _ours(self):
                return super()._attn(query, key, value, attention_mask)
            return _by_head(self, query, key, value, attention_mask, scaling=1 / float(self.scale_attn))

    return GPTJAttention


def _gpt_neo(theirs: Any, file: Any) -> Any:
    class GPTNeoSelfAttention(theirs):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            if not _ours(self):
                return super()._attn(query, key, value, attention_mask)
            # The model's mask ignores windows: they are applied here.
            window = self.config.window_size if self.attention_type == "local" else None
            return _by_head(self, query, key, value, None, scaling=1.0, sliding_window=window)

    return GPTNeoSelfAttention


def _falcon(theirs: Any, file: Any) -> Any:
    class FalconAttention(theirs):
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
            if alibi is not None:
                raise ValueError(
                    "its FalconAttention adds a bias by position (ALiBi), which no kernel of millrace takes; "
                    "models with alibi: false are taken"
                )
            heads = self._split_heads(self.query_key_value(hidden_states))
            query, key, value = (x.transpose(1, 2) for x in heads)
            query, key = file.apply_rotary_pos_emb(query, key, *position_embeddings)
            if layer_past is not None:
                key, value = layer_past.update(key, value, self.layer_idx)
            out, _ = attention(self, query, key, value, attention_mask, context=kwargs.get("context"))
            return self.dense(out.flatten(2)), None

    return FalconAttention


def _by_head(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    out, weights = attention(module, query, key, value, mask, **options)
    return out.transpose(1, 2), weights


MAKERS = {"falcon": _falcon, "gpt_neo": _gpt_neo, "gptj": _gptj}
