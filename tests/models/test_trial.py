"""The trial of an architecture: what is right passes, what is wrong anywhere is refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from millrace.kernels.packed_attention import Segments
from millrace.models import attention, logprobs, trial
from millrace.models.load import LANGUAGE, Model, ModelError, fresh_config, fresh_model
from millrace.models.trial import try_packed, with_small_spans
from millrace.models.twin import SPAN, twin_of

READING = LANGUAGE.reading
Broken = Callable[..., Any]


def small_of(architecture: str, **shape: Any) -> Any:
    return twin_of(AutoConfig.for_model(architecture, **shape), READING.make)


@pytest.fixture(scope="module")
def gemma2() -> Any:
    return small_of("gemma2")


def test_what_is_right_passes(gemma2: Any) -> None:
    assert try_packed(gemma2, READING) == ""


def with_option(name: str, change: Callable[[Any], Any]) -> Broken:
    """Packed attention that takes one of its options for another."""
    packed = attention.packed_attention

    def wrong(*heads: Any, **options: Any) -> Tensor:
        return packed(*heads, **options | {name: change(options[name])})

    return wrong


def blind_gradient(query: Tensor, *rest: Any, **options: Any) -> Tensor:
    return PACKED(query.detach(), *rest, **options)


PACKED = attention.packed_attention


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (with_option("window", lambda window: window and window + 1), "its packed log-probabilities differ"),
        (with_option("window", lambda window: None), "its packed log-probabilities differ"),
        (with_option("softcap", lambda softcap: None), "its packed log-probabilities differ"),
        (with_option("scale", lambda scale: scale * 1.01), "its packed log-probabilities differ"),
        (
            blind_gradient,
            "the gradient of its model.layers.",
        ),
    ],
)
def test_a_wrong_forward_or_gradient_is_found(
    gemma2: Any, monkeypatch: pytest.MonkeyPatch, wrong: Broken, problem: str
) -> None:
    monkeypatch.setattr(attention, "packed_attention", wrong)
    monkeypatch.setattr(trial, "SEEDS", (0,))
    assert try_packed(gemma2, READING).startswith(problem)


@pytest.mark.slow
def test_what_is_wrong_where_sequences_share_a_beginning_is_found(
    gemma2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = Segments.sharing

    def late(slot_W: Tensor, length_A: Tensor, first_A: Tensor, num_tokens: int) -> Segments:
        return sharing(slot_W.flip(0) if first_A.any() else slot_W, length_A, first_A, num_tokens)

    monkeypatch.setattr(logprobs.Segments, "sharing", late)
    assert "where sequences begin alike" in try_packed(gemma2, READING)


@pytest.mark.slow
def test_a_trial_without_power_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bold = trial.embolden

    def deaf(model: Model, seed: int) -> None:
        """Attention that adds nearly nothing could be anything."""
        bold(model, seed)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(1e-6)

    monkeypatch.setattr(trial, "embolden", deaf)
    assert try_packed(small_of("qwen3"), READING) == (
        "the trial has no power for layers like its layer 0: it misses a segment that ends a token late"
    )


def test_a_number_of_tokens_is_found_under_any_name() -> None:
    """Whatever changes the plain logits where it is small, is small in the trial."""
    config = small_of("llama")
    config.memory, config.notes = 4096, 4096

    def plain(model: Model, token_1T: Tensor) -> Tensor:
        made = READING.plain(model, token_1T)
        return made * (torch.arange(made.shape[1]) < model.config.memory)[None, :, None]

    small = with_small_spans(config, replace(READING, plain=plain))
    assert (small.memory, small.notes) == (SPAN, 4096)
    assert config.memory == 4096


CONV = {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None}
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": TINY | CONV | {"num_key_value_heads": 2},
    "falcon_h1": TINY | {"num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "jamba": TINY
    | {"num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}
    | {"num_experts": 4},
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_fresh_model_whose_mixers_hardly_move_its_logits_is_refused_by_name(architecture: str) -> None:
    config = fresh_config(architecture, HYBRIDS[architecture], vocab_size=40, eos_token_id=0)
    with pytest.raises(ModelError, match=r"mixes tokens outside of millrace's attention, as a convolution"):
        fresh_model(config, seed=0, dtype=torch.float32)


def test_a_verdict_is_of_the_config_without_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def find(small: Any) -> str:
        asked.append(small)
        return "wrong"

    for size in (64, 2048, 64):
        config = AutoConfig.for_model("llama", hidden_size=size, num_attention_heads=8, rms_norm_eps=0.0123)
        before = copy.deepcopy(config.to_dict())
        assert trial.answer("a test of verdicts", config, READING, find) == "wrong"
        assert config.to_dict() == before
    assert len(asked) <= 1
