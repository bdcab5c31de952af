"""The sizes of a decoder, read from its config, and its weights counted exactly.

D = model width, H = query heads, J = key heads, K = head width, F = MLP width, E = experts, V = vocabulary.
One layer of a Llama-like decoder holds

    D (H + 2 J) K + H K D  of attention,  3 D F  of the MLP (with experts: E times that, and a router D E),

and its norms and biases; outside the layers there are an embedding V D, a norm D and, unless tied, a head
V D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from millrace.errors import PlanError
from millrace.planner.layout import Sizes

HeadNorms = Literal["none", "head", "row"]


@dataclass(frozen=True, slots=True)
class _Family:
    head_norms: HeadNorms = "none"
    num_norms: int = 2
    wide_norms: bool = False
    tied: bool = False
    head_width: int | None = None
    query_bias: bool = False
    windowed: Literal["none", "all", "alternate", "five_of_six"] = "none"
    dense_width: bool = True


FAMILIES = {
    "llama": _Family(),
    "qwen2": _Family(query_bias=True),
    "qwen3": _Family(head_norms="head", head_width=128),
    "mistral": _Family(windowed="all"),
    "phi3": _Family(windowed="all"),
    "gemma2": _Family(num_norms=4, wide_norms=True, tied=True, head_width=256, windowed="alternate"),
    "gemma3_text": _Family(
        head_norms="head", num_norms=4, wide_norms=True, tied=True, head_width=256, windowed="five_of_six"
    ),
    "olmo2": _Family(head_norms="row", wide_norms=True),
    "qwen3_moe": _Family(head_norms="head"),
    "mixtral": _Family(windowed="all", dense_width=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(Sizes):
    """All sizes of a decoder: H, J, V, F and E are those of `Sizes`, D = width, K = head_width.

    Attributes:
        tied: whether the head is the embedding.
        num_expert_layers: layers with experts as their MLP.
        num_norms: norms of width D in a layer.
        head_norms: of queries and keys: one weight for each number of a head (Qwen3), or of the row (OLMo 2).
        wide_norms: whether norms multiply by their weight in float32 (Gemma, OLMo 2).
        window: tokens a windowed layer looks back; None where no layer is.
        capped_scores: whether attention scores are bounded by tanh (Gemma 2).
    """

    width: int
    head_width: int
    tied: bool
    experts_per_token: int = 0
    expert_width: int = 0
    num_expert_layers: int = 0
    num_norms: int = 2
    head_norms: HeadNorms = "none"
    wide_norms: bool = False
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None
    num_windowed_layers: int = 0
    capped_scores: bool = False
    capped_logits: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape that a config.json, or a transformers config as a dict, describes.

        A PlanError if the model type is not in `FAMILIES`, or a size is missing or not a whole number.
        """
        config = config.get("text_config") or config
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise PlanError(f"model type {kind} cannot be planned for; there are: {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        width, num_layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
        num_heads = _size(config, "num_attention_heads")
        biased = bool(config.get("attention_bias"))
        window, num_windowed = _window(config, family, num_layers)
        return cls(
            width=width,
            num_layers=num_layers,
            num_heads=num_heads,
            num_key_heads=_size(config, "num_key_value_heads", num_heads),
            head_width=_size(config, "head_dim", family.head_width or width // num_heads),
            vocabulary=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            mlp_width=_size(config, "intermediate_size"),
            **_experts(config, family, num_layers),
            num_norms=family.num_norms,
            head_norms=family.head_norms,
            wide_norms=family.wide_norms,
            query_bias=family.query_bias or biased,
            output_bias=biased,
            mlp_bias=bool(config.get("mlp_bias")),
            window=window,
            num_windowed_layers=num_windowed,
            capped_scores=config.get("attn_logit_softcapping") is not None,
            capped_logits=config.get("final_logit_softcapping") is not None,
        )

    @classmethod
    def known(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """Like `of`, but return None for an unsupported model type."""
        kind = (config.get("text_config") or config).get("model_type")
        return cls.of(config) if kind in FAMILIES else None

    @property
    def attention_parameters(self) -> int:
        """Of one layer: four projections, their biases, the norms of queries and keys."""
        query, key = self.num_heads * self.head_width, self.num_key_heads * self.head_width
        biases = self.query_bias * (query + 2 * key) + self.output_bias * self.width
        norms = {"none": 0, "head": 2 * self.head_width, "row": query + key}[self.head_norms]
        return 2 * self.width * (query + key) + biases + norms

    @property
    def mlp_parameters(self) -> int:
        """Of one layer without experts."""
        return 3 * self.width * self.mlp_width + self.mlp_bias * (2 * self.mlp_width + self.width)

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return 3 * self.width * self.expert_width

    @property
    def head_parameters(self) -> int:
        """Of the output head, which may be the embedding too."""
        return self.vocabulary * self.width

    @property
    def num_expert_parameters(self) -> int:
        """Of all experts of all layers."""
        return self.num_expert_layers * self.num_experts * self.expert_parameters

    def idle_expert_parameters(self, num_tokens: int) -> float:
        """Of experts that none of so many tokens is sent to, on average."""
        missed = (1 - self.experts_per_token / max(self.num_experts, 1)) ** num_tokens
        return self.num_expert_parameters * missed

    @property
    def num_parameters(self) -> int:
        """Every weight once, as transformers counts them."""
        return self._all_but_experts + self.num_expert_parameters

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token goes through: of the experts, those it is sent to."""
        used = self.num_expert_layers * self.experts_per_token * self.expert_parameters
        return self._all_but_experts + used

    @property
    def _all_but_experts(self) -> int:
        layers = self.num_layers * (self.attention_parameters + self.num_norms * self.width)
        dense = (self.num_layers - self.num_expert_layers) * self.mlp_parameters
        routers = self.num_expert_layers * self.num_experts * self.width
        return layers + dense + routers + self.width + (2 - self.tied) * self.head_parameters


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise PlanError(f"the model's config lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{key} is {value!r} in the model's config; it must be a whole number above 0")
    return value


def _experts(config: Mapping[str, Any], family: _Family, num_layers: int) -> dict[str, int]:
    key = next((key for key in ("num_experts", "num_local_experts") if config.get(key)), None)
    if key is None:
        return {}
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    sparse = [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0]
    return {
        "num_experts": _size(config, key),
        "experts_per_token": _size(config, "num_experts_per_tok"),
        "expert_width": _size(config, "moe_intermediate_size" if family.dense_width else "intermediate_size"),
        "num_expert_layers": len(sparse),
    }


def _window(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, int]:
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        num_windowed = list(kinds).count("sliding_attention")
    else:
        full = {"none": 1, "all": num_layers + 1, "alternate": 2, "five_of_six": 6}[family.windowed]
        num_windowed = num_layers - num_layers // full
    return (window, num_windowed) if window and num_windowed else (None, 0)
