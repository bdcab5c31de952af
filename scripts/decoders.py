"""Try every causal decoder of the installed transformers, and write docs/models.md.

    make decoders                        # all, a minute or two
    make decoders ARGS="qwen3 gemma2"    # print only these rows

Each family is made small and bold from its config's defaults, and loaded as a run loads it. Where millrace
accepts it, the trainer's log-probabilities of random sequences in one row and the engine's of what it samples
are compared with transformers' own plain forward of each sequence alone, whatever the trials at loading said.
The exit code is 0 only when no family is accepted and wrong.
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from millrace.data.packing import pack_demonstrations
from millrace.inference.engine import PagedEngine
from millrace.inference.engine_trial import check_engine
from millrace.models.decoding import prepare
from millrace.models.load import LANGUAGE, Model, ModelError, fresh_model
from millrace.models.logprobs import chosen_logprobs
from millrace.models.own_attention import plain_implementation
from millrace.models.trial import with_small_spans
from millrace.models.twin import VOCABULARY, TwinError, embolden, twin_of
from millrace.types import SamplingParams

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SEED = 7
# Tokens of the sequences; two begin alike.
LENGTHS = (37, 5, 29)
COMMON = 5
NUM_TOKENS = 12
# A wrong model of bold weights is off by nats; a right one's rounding stays far below this.
MOST = 0.01

# What a config lacks by default, and without which transformers makes no model.
LACKING: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 1e4}},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 6, "num_hidden_layers": 18},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
# Encoders that transformers makes decoders of by this.
DECODER = {"is_decoder": True}
# What a family can do and its config leaves off by default; tried besides.
BESIDES: dict[str, list[dict[str, Any]]] = {
    "falcon": [{"alibi": True, "multi_query": multi_query} for multi_query in (True, False)],
    "lfm2": [
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "full_attn_idxs": None,
        }
    ],
    "minimax_m3_vl_text": [
        {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "num_hidden_layers": 4}
    ],
    "phimoe": [{"sliding_window": 5}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None}],
    "qwen2_moe": [
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None}
    ],
    "qwen3": [{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None}],
}


# In a word or two, by what stands in the sentence; the first that fits.
WORDS = (
    (r"makes no model|no small model", "not made"),
    (r"Mamba|Mixer|Delta|Lightning|Rglru|LSTM|ZeroPad2d", "recurrent state"),
    (r"ShortConv", "convolution"),
    (r"s_aux|sinks", "attention sinks"),
    (r"indices", "attention to chosen keys"),
    (r"position_bias|attention mask or changes it", "bias on scores"),
    (r"mask depends", "mask of pictures"),
    (r"head is not", "another head"),
    (r"only the first sequence", "positions or mixing of its own"),
    (r"no power", "cannot be tried"),
    (r"", "attention of its own"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a family.

    Attributes:
        name: its model type.
        classname: of transformers' model.
        reason: why it is refused; empty where it is accepted.
        difference: the largest of a log-probability from transformers' own, where it is accepted.
    """

    name: str
    classname: str
    reason: str = ""
    difference: float = 0.0

    @property
    def right(self) -> bool:
        """Whether it is accepted and agrees."""
        return not self.reason and self.difference <= MOST

    @property
    def wrong(self) -> bool:
        """Whether it is accepted and does not agree."""
        return not self.reason and not self.difference <= MOST

    @property
    def word(self) -> str:
        """Why it is refused, in a word or two."""
        return next(word for pattern, word in WORDS if re.search(pattern, self.reason))


def families() -> list[str]:
    """The model types of all causal decoders of transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def row(name: str) -> Row:
    """Try one family, in every way that is listed."""
    classname = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    difference = 0.0
    for more in [{}, *BESIDES.get(name, [])]:
        try:
            config = small_config(name, more)
            model = fresh_model(config, seed=SEED, dtype=torch.float32)
            check_engine(model)
        except (TwinError, ModelError) as error:
            return Row(name, classname, _reason(str(error)) + _where(more))
        except Exception as error:  # whatever transformers raises of a config that it makes no model of
            return Row(
                name, classname, f"transformers makes no model of its config's defaults: {_first(error)}"
            )
        difference = max(difference, apart(config, model))
    return Row(name, classname, difference=difference)


def small_config(name: str, more: dict[str, Any]) -> PretrainedConfig:
    """A small config of a family whose windows and chunks are short."""
    config = AutoConfig.for_model(name, **LACKING.get(name, {}), **more)
    text = config.get_text_config()
    if getattr(text, "is_decoder", None) is False and hasattr(text, "add_cross_attention"):
        text.is_decoder = True
    return with_small_spans(twin_of(config, LANGUAGE.reading.make), LANGUAGE.reading)


def apart(config: PretrainedConfig, model: Model) -> float:
    """The largest difference of our log-probabilities from those of transformers' own modules.

    Args:
        config: of the model.
        model: accepted; its weights are made bold.
    """
    embolden(model, SEED)
    theirs = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=plain_implementation(config), dtype=torch.float32
    ).eval()
    theirs.load_state_dict(model.state_dict())
    return max(_trainer_apart(model, theirs), _engine_apart(model, theirs))


def _trainer_apart(model: Model, theirs: Model) -> float:
    generator = torch.Generator().manual_seed(SEED)
    rows = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    rows[-1][:COMMON] = rows[0][:COMMON]
    batch = pack_demonstrations([(each[:1], each[1:]) for each in rows], lambda mask_T, _: mask_T.float())
    with torch.no_grad():
        found_N, _ = chosen_logprobs(model, batch, temperature=1.0)
    return _largest(found_N, torch.cat([_plain(theirs, each)[: len(each) - 1] for each in rows]))


def _engine_apart(model: Model, theirs: Model) -> float:
    sampler = copy.deepcopy(model).requires_grad_(False)
    prepare(sampler)
    engine = PagedEngine(sampler, lambda tokens: "", max_cache_tokens=256, block_size=4, max_batch_tokens=10)
    prompts = [[3 + n for n in range(23)], [9, 8, 7], [3 + n for n in range(23)]]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=4.0, logprobs="raw", seed=n) for n in range(3)
    ]
    worst = 0.0
    for prompt, drawn in zip(prompts, engine.generate(prompts, params), strict=True):
        expected_N = _plain(theirs, [*prompt, *drawn.token_ids])[len(prompt) - 1 :]
        worst = max(worst, _largest(torch.from_numpy(drawn.logprobs), expected_N))
    return worst


@torch.no_grad()
def _plain(theirs: Model, tokens: Sequence[int]) -> Tensor:
    """Log-probability of each token but the first, [T - 1]."""
    token_T = torch.tensor(tokens)
    logit_TV = theirs(token_T[None], use_cache=False).logits[0].float()
    return logit_TV.log_softmax(-1)[:-1].gather(1, token_T[1:, None])[:, 0]


def _largest(found: Tensor, expected: Tensor) -> float:
    difference = float((found.float() - expected.float()).abs().max())
    return difference if difference == difference else float("inf")


def _first(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error) or type(error).__name__).strip()[:300]


def _reason(sentence: str) -> str:
    """Without what every sentence begins with, and without how far numbers are apart, which is rounding's."""
    told = _first(Exception(sentence))
    why = re.sub(r"^model type \S+ cannot be (trained|sampled) by millrace: ", "", told)
    return re.sub(r"(differs?( from its own)?) by [0-9.e+-]+.*$", r"\1", why)


def _where(more: dict[str, Any]) -> str:
    return f" (with {', '.join(sorted(more))})" if more else ""


def page(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    right = [each for each in rows if each.right]
    wrong = [each for each in rows if each.wrong]
    refused = [each for each in rows if each.reason]
    lines = [
        HEAD.format(
            version=transformers.__version__, right=len(right), refused=len(refused), wrong=len(wrong)
        ),
        "## Right\n",
        "| model type | class in transformers |",
        "|---|---|",
        *(f"| `{each.name}` | `{each.classname}` |" for each in right),
    ]
    if wrong:
        lines += [
            "\n## Accepted and wrong\n",
            "| model type | class in transformers | off by |",
            "|---|---|---|",
        ]
        lines += [f"| `{each.name}` | `{each.classname}` | {each.difference:.2g} |" for each in wrong]
    lines += [
        "\n## Refused\n",
        "| model type | class in transformers | why | what loading says |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{each.name}` | `{each.classname}` | {each.word} | {each.reason.replace('|', ' ')} |"
        for each in refused
    ]
    return "\n".join(lines) + "\n"


HEAD = """<!-- Written by `make decoders`; do not edit. -->
# Model families

Every causal decoder of transformers {version}: {right} are right, {refused} are refused, {wrong} are
accepted and wrong. `make decoders` writes this page. Each family is made small from its config's defaults,
with bold weights and short windows, and loaded as a run loads it. *Right* means that millrace accepts it, and
that the trainer's and the engine's log-probabilities are those of transformers' plain forward of each
sequence alone. *Refused* means that loading it ends with the sentence given here. A folder with other options
than the defaults is tried in the same way when it is loaded.
"""


def main(arguments: Sequence[str]) -> int:
    """Write the page, or print some rows."""
    warnings.filterwarnings("ignore")
    names = list(arguments) or families()
    unknown = sorted(set(names) - set(families()))
    if unknown:
        print(f"{unknown[0]} is no causal decoder of transformers {transformers.__version__}")
        return 2
    rows = []
    for name in names:
        rows.append(row(name))
        told = rows[-1].reason or ("right" if rows[-1].right else f"WRONG by {rows[-1].difference:.2g}")
        print(f"{name:26} {told}", flush=True)
    wrong = [each.name for each in rows if each.wrong]
    print(f"{sum(each.right for each in rows)} right, {len(wrong)} accepted and wrong, of {len(rows)}")
    if not arguments:
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
