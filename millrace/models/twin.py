"""A small model of the same classes as a given one; its weights are large, so that every token matters.

The computation of an architecture does not depend on its width. So the twin keeps every kind of layer, the
order of neighbours, whether widths are equal or not, and each option of the config. It shrinks widths, the
number of layers and experts, the vocabulary, and every window or chunk below the length of a trial.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCABULARY = 96
WIDTH, HEADS, HEAD_WIDTH, EXPERTS, SPAN = 64, 4, 16, 4, 5
# An integer field above this may count tokens: a trial has no sequence as long.
LONGEST = 96
# Every sequence of a trial is shorter.
POSITIONS = 128
MOST_LAYERS = 16
MOST_PARAMETERS = 8_000_000

_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|num_blocks)$"
)
# Patterns of fields for the first or last layer of a range.
_FIRST = re.compile(
    r"^(first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_(start|end)_index)$"
)
_LAST = re.compile(r"^num_kv_shared_layers$")
_WHICH = re.compile(r"^(mlp_only_layers|moe_layers|full_attn_idxs|hybrid_layer_ids|cross_attention_layers)$")
_TOKENS = re.compile(r"(^|_)(bos|eos|pad|sep|cls|mask|eod|unk|start|end)_token_ids?$")
_FREE = ("bos_token_id", "eos_token_id", "pad_token_id")
_INDEX = re.compile(r"idx|index|layer_id|layer_num|seed")
_SPANS = re.compile(
    r"^(?!.*(layer|pattern|every|use_|num_chunks|feed_forward|lm_head)).*(window|chunk_(size|length)|local_attention$"
    r"|floor_scale|index_topk$|^(index_)?block_size$|_n_floor)"
)


class TwinError(ValueError):
    """A model has no twin; the message gives the reason."""


@dataclass
class _Widths:
    config: Mapping[str, Any]
    others: dict[int, int] = field(default_factory=dict)

    def first(self, *names: str) -> int | None:
        for name in names:
            value = self.config.get(name)
            if type(value) is int:
                return value
        return None

    @property
    def heads(self) -> int:
        return (
            self.first("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
            or 1
        )

    @property
    def hidden(self) -> int:
        return self.first("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim") or 0

    @property
    def inner(self) -> int:
        return WIDTH * (self.first("mamba_expand", "expand") or 2)

    def few_heads(self, value: int) -> int:
        """Many query heads stay many, one stays one, any other number becomes two."""
        if value in (0, 1):
            return value
        if self.first("expand") is not None and self.first("state_size") is not None:
            return 2 * WIDTH // HEAD_WIDTH  # Mamba's heads
        if value == self.heads:
            return HEADS
        grouped = self.first("num_key_value_heads", "num_kv_heads")
        return 1 if grouped not in (None, value, self.heads) and value < self.heads else 2

    def head_width(self, value: int) -> int:
        """Wider or narrower than the model's width divided by its heads, as before."""
        rotary = self.first("qk_rope_head_dim")
        if rotary is not None:
            nope = self.first("qk_nope_head_dim") or 0
            known = {rotary: 8, nope: HEAD_WIDTH, rotary + nope: HEAD_WIDTH + 8}
            return known.get(value, 12)
        if self.first("expand") is not None and self.first("state_size") is not None:
            return HEAD_WIDTH  # Mamba's heads
        even = self.hidden / self.heads
        return HEAD_WIDTH if value == even else HEAD_WIDTH // 2 if value < even else 3 * HEAD_WIDTH // 2

    def mixer_width(self, value: int) -> int:
        if value == self.hidden:
            return WIDTH
        return self.others.setdefault(value, 48 + 16 * (len(self.others) % 4))

    def of_hidden(self, value: int) -> int:
        return WIDTH if value == self.hidden else WIDTH // 2


Rule = Callable[[_Widths, int], int]
# The first pattern that fits a field's name gives its size in the twin.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"^vocab_size$", lambda w, v: VOCABULARY),
    # That of types or groups may be two.
    (
        r"(^|_)vocab_size(_per_layer_input|_base)?$|_group_vocab$",
        lambda w, v: min(v, VOCABULARY) if v <= 4 else VOCABULARY,
    ),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length)$", lambda w, v: POSITIONS),
    (r"^max_target_positions$", lambda w, v: POSITIONS),
    (r"^(hidden_size|d_model|n_embd|emb_dim|embedding_dim)$", lambda w, v: WIDTH),
    (r"^(embedding_size|word_embed_proj_dim|input_embedding_size|output_embedding_size)$", _Widths.of_hidden),
    (r"^linear_num_(key|value)_heads$", lambda w, v: 2 if v == w.first("linear_num_key_heads") else 4),
    (r"^linear_(key|value)_head_dim$", lambda w, v: 8 if v == w.first("linear_key_head_dim") else 12),
    (r"^(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", lambda w, v: w.inner // HEAD_WIDTH),
    (r"^(mamba_d_head|mamba_head_dim|mamba_headdim)$", lambda w, v: HEAD_WIDTH),
    (r"^(mamba_d_state|state_size|ssm_state_size)$", lambda w, v: 8),
    (r"^(mamba_n_groups|mamba_ngroups|n_groups)$", lambda w, v: min(v, 2)),
    (r"^mamba_d_ssm$", lambda w, v: w.inner),
    (r"^lru_width$", _Widths.of_hidden),
    (r"^(time_step_rank|mamba_dt_rank)$", lambda w, v: 4),
    (r"^index_n_heads$", lambda w, v: 2),
    (r"^index_(topk|local)_blocks$", lambda w, v: 1),
    (r"^index_head_dim$", lambda w, v: HEAD_WIDTH),
    (
        r"^(swa_)?(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|attention_heads)$",
        _Widths.few_heads,
    ),
    (r"^num_decoder_attention_heads$", _Widths.few_heads),
    (r"^encoder_attention_heads$", _Widths.few_heads),
    (r"^(swa_)?(num_key_value_heads|num_kv_heads)$", _Widths.few_heads),
    (r"^num_query_groups$", _Widths.few_heads),
    (r"^linear_num_heads$", lambda w, v: 2),
    (r"^linear_head_dim$", lambda w, v: 8),
    (r"^kv_lora_rank$", lambda w, v: 20),
    (r"^q_lora_rank$", lambda w, v: 28),
    (r"^(q|k|v|qk|swa|swa_v|global|qk_nope|qk_rope|attention)_?head_(dim|size)$", _Widths.head_width),
    (
        r"^(head_dim|kv_channels|dim_head|d_head|d_kv|v_head_dim|qk_head_dim|global_head_dim)$",
        _Widths.head_width,
    ),
    (r"^rotary_dim$", lambda w, v: HEAD_WIDTH if v * w.heads == w.hidden else HEAD_WIDTH // 2),
    (r"^query_pre_attn_scalar$", lambda w, v: HEAD_WIDTH),
    (r"^(n|num)_shared_experts$|^moe_num_shared_experts$", lambda w, v: min(v, 2)),
    (r"^(n|num)_(\w+_)?experts$|^moe_num_experts$|^zero_expert_num$", lambda w, v: min(v, EXPERTS)),
    (r"^(num_experts_per_tok(en)?|moe_topk|moe_k|top_k)$", lambda w, v: min(v, 2)),
    (r"^(n_group|num_expert_group)$", lambda w, v: min(v, 2)),
    (r"^topk_group$", lambda w, v: 1),
    (
        r"(intermediate|ffn|feed_forward|router_hidden).*(size|dim)|^dff$|^dim_ff$|^d_inner$",
        _Widths.mixer_width,
    ),
    (r"^(hidden_size_per_layer_input|ple_embed_dim)$", lambda w, v: 16 if v else 0),
    (r"^(laurel_rank|gated_norm_rank|hc_lowrank|o_lora_rank|adapter_rank)$", lambda w, v: 8),
)


def decoder_stack(model: nn.Module) -> nn.ModuleList | None:
    """Return the layers of a decoder: of its lists of modules the longest one, or the largest of several."""
    # What reads pictures or sounds beside it has layers too.
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    found: list[nn.ModuleList] = []
    for part in (decoder, model):
        if not found and isinstance(part, nn.Module):
            found = [each for each in part.modules() if isinstance(each, nn.ModuleList) and len(each)]
    counted = [(len(each), sum(p.numel() for p in each.parameters())) for each in found]
    return found[counted.index(max(counted))] if found else None


def layer_kinds(model: nn.Module) -> list[int]:
    """Number the kind of each layer, in order of first occurrence, by modules, their shapes and options."""
    stack = decoder_stack(model)
    seen: dict[Any, int] = {}
    return [seen.setdefault(_signature(layer), len(seen)) for layer in ([] if stack is None else stack)]


def _signature(layer: nn.Module) -> Any:
    return tuple(
        (
            name,
            type(module).__name__,
            tuple(sorted((key, str(value)) for key, value in vars(module).items() if _is_option(key, value))),
            tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _is_option(key: str, value: Any) -> bool:
    if key.startswith("_") or key == "training" or _INDEX.search(key):
        return False
    return value is None or type(value) in (bool, str) or (type(value) is int and bool(_SPANS.match(key)))


def chosen_layers(kinds: Sequence[int], *, runs: bool) -> list[int]:
    """Choose layers that hold each kind, each pair of neighbours and a repeat, and end as the model does.

    With `runs`, two of several layers of a kind in a row are enough; otherwise the first ones are taken.
    """
    left: list[int] = []
    for index, kind in enumerate(kinds):
        if not runs or len(left) < 2 or [kinds[each] for each in left[-2:]] != [kind, kind]:
            left.append(index)
    wanted = set(itertools.pairwise(kinds[index] for index in left))
    count = min(len(kinds), 2)
    while count < len(left) and (
        set(itertools.pairwise(kinds[index] for index in left[:count])) < wanted
        or len({kinds[index] for index in left[:count]}) == count
    ):
        count += 1
    chosen = left[: min(count, MOST_LAYERS)]
    # Some models see to it that their last layer is of one kind.
    return [*chosen, len(kinds) - 1] if runs and kinds[chosen[-1]] != kinds[-1] else chosen


def twin_config(
    config: PretrainedConfig, layers: Sequence[int], token: int | None = None
) -> PretrainedConfig:
    """Build the config of a twin with these layers, with errors of transformers; `token` is a special one."""
    text = config.get_text_config()
    small = _made(type(text), _small(text.to_dict(), layers, token))
    if text is config:
        return small
    whole = copy.deepcopy(config)
    for name, value in vars(config).items():
        if value is text:
            setattr(whole, name, small)
        elif isinstance(value, PretrainedConfig):
            setattr(whole, name, _made(type(value), _small(value.to_dict(), [0, 1], token)))
    return whole


def twin_of(
    config: PretrainedConfig, make: Callable[[PretrainedConfig], PreTrainedModel]
) -> PretrainedConfig:
    """Build the config of the twin of the model that `make` builds of another config on the default device.

    A TwinError if there is no small model of these classes; it names what failed.
    """
    with torch.device("meta"):
        kinds = layer_kinds(make(config))
    if not kinds:
        raise TwinError("it has no list of layers")
    problem: Exception = TwinError("it stays large whatever its config has")
    for runs, token in itertools.product((True, False), (None, 0)):
        layers = chosen_layers(kinds, runs=runs)
        try:
            small = twin_config(config, layers, token=token)
            with torch.device("meta"):
                model = make(small)
            same = len(set(layer_kinds(model))) >= len({kinds[layer] for layer in layers})
            if sum(p.numel() for p in model.parameters()) <= MOST_PARAMETERS and (same or not runs):
                logits_of(make(small).eval(), range(1, SPAN))
                return small
        except Exception as error:  # whatever a config of these classes leads to
            problem = error
    with torch.device("meta"):
        if sum(p.numel() for p in make(config).parameters()) <= MOST_PARAMETERS:
            return copy.deepcopy(config)  # small as it is
    raise TwinError(f"no small model of its kind can be made: {first_line(problem)}")


def first_line(error: Exception) -> str:
    """Return the message of an error in one line; a line that only announces the next is joined with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _made(kind: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    """Build a config without special tokens, but for those that it may not lack, which are token 0."""
    while True:
        try:
            made: PretrainedConfig = kind.from_dict(fields)
            return made
        except Exception as error:  # transformers validates with several exception types of its own
            lacking = [n for n in _FREE if n in fields and fields[n] is None and f"'{n}'" in str(error)]
            if not lacking:
                raise
            fields = fields | dict.fromkeys(lacking, 0)


def _small(fields: dict[str, Any], layers: Sequence[int], token: int | None = None) -> dict[str, Any]:
    widths = _Widths(fields)
    fields = fields | {name: token for name in _FREE if name in fields}
    counts = [key for key in fields if _LAYERS.match(key)]
    count = widths.first("num_hidden_layers", *counts) or 0
    return {name: _small_field(name, value, widths, count, layers) for name, value in fields.items()}


def _small_field(name: str, value: Any, widths: _Widths, count: int, layers: Sequence[int]) -> Any:
    if _TOKENS.search(name):
        return value and 0
    if isinstance(value, list | tuple):
        return _small_list(name, list(value), widths, count, layers)
    if isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config":
        return _small(value, [0, 1])
    if name == "per_layer_config" and isinstance(value, dict):
        by_layer = {int(layer): each for layer, each in value.items()}
        changed = {layer: by_layer.get(layer) or {} for layer in layers}
        whole = {
            layer: _small({**widths.config, **changed[layer]}, [0]) for layer in layers if changed[layer]
        }
        return {
            new: {key: whole[layer][key] for key in changed[layer]}
            for new, layer in enumerate(layers)
            if layer in whole
        }
    if isinstance(value, dict) and "rope" in name:
        return {key: _small_rope(key, each, widths) for key, each in value.items()}
    if type(value) is not int:
        return value
    if _LAYERS.match(name) or (name == "encoder_layers" and value):
        return min(value, len(layers)) if count != value else len(layers)
    if _FIRST.match(name):
        return sum(layer < value for layer in layers)
    if _LAST.match(name):
        return sum(layer >= count - value for layer in layers)
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            return rule(widths, value)
    return min(value, SPAN) if _SPANS.match(name) and value > 1 else value


def _small_list(
    name: str, values: list[Any], widths: _Widths, count: int, layers: Sequence[int]
) -> list[Any]:
    if _WHICH.match(name):
        return [new for new, layer in enumerate(layers) if layer in values]
    if name == "attention_types":
        kinds = [kind for some, times in values for kind in some * times]
        return [[[kinds[layer] for layer in layers], 1]]
    if len(values) != count:
        return values
    return [_small_field(name, values[layer], widths, 0, [0]) for layer in layers]


def _small_rope(name: str, value: Any, widths: _Widths) -> Any:
    if isinstance(value, dict):
        return {key: _small_rope(key, each, widths) for key, each in value.items()}
    if not isinstance(value, list | tuple) or not value:
        return value
    width = widths.first("head_dim", "kv_channels")
    old = width if width is not None else widths.hidden // widths.heads
    new = widths.head_width(old) if width is not None else HEAD_WIDTH
    if name == "mrope_section":
        rest = new // 2 - 2 * (len(value) - 1)
        return [rest, *[2] * (len(value) - 1)]
    return list(value)[: max(1, round(len(value) * new / old))]


@torch.no_grad()
def embolden(model: nn.Module, seed: int) -> None:
    """Give every parameter new numbers, by which attention, position and state move the logits."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    turned = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if parameter.ndim < 2:
            parameter.add_(noise * 0.2)
        elif id(parameter) in tables:
            parameter.copy_(noise * 0.4)
        else:
            fan_in = (
                parameter.shape[0]
                if id(parameter) in turned
                else math.prod(parameter.shape[parameter.ndim - 1 :])
            )
            parameter.copy_(noise * 1.5 / math.sqrt(fan_in))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator).to(buffer) * 0.1)


def logits_of(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Compute the logits of one sequence alone by transformers' own modules, uncached, [T, V]."""
    logit_1TV: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits
    return logit_1TV[0]
