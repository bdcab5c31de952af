from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from millrace.kernels.packed_attention import Segments, packed_attention
from millrace.models.attention import Packed, attention
from millrace.models.facts import LayerFacts, facts_of
from millrace.models.logprobs import hidden_states
from tests.close import close_fp32
from tests.models.tiny import SHAPES, tiny_model
from tests.twins.dense_cache import Decode, DenseCache, Prefill


class Layer(nn.Module):
    millrace_layer = LayerFacts("layer", None, None, None, (0,), writes=True)


def one_token(**kwargs: Any) -> Any:
    x = torch.ones(1, 1, 1, 4)
    return attention(Layer(), x, x, x, kwargs.pop("attention_mask", None), **kwargs)


def test_a_forward_without_a_context_says_how_to_call_the_model() -> None:
    with pytest.raises(ValueError) as error:
        tiny_model("llama")(torch.tensor([[1, 2]]), use_cache=False)
    assert str(error.value) == (
        "a model loaded by millrace must be called with context=Packed(...) or Paged(...)"
    )


ONE = Packed(Segments.of(torch.tensor([1])))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"attention_mask": torch.zeros(1)}, "a mask of its own, which no kernel takes"),
        ({"s_aux": torch.zeros(1)}, "s_aux (attention sinks), which no kernel of millrace takes"),
        ({"dropout": 0.1}, "dropout, which no kernel of millrace takes"),
        ({"is_causal": False}, "is_causal=False, which no kernel of millrace takes"),
        (
            {"indices": torch.zeros(1), "alpha": 2},
            "alpha and indices (a choice of keys for each query), which no kernel of millrace takes",
        ),
    ],
    ids=str,
)
def test_what_would_change_the_result_is_refused(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        one_token(context=ONE, **extra)
    assert str(error.value) == f"Layer gives attention {words}"


def test_what_changes_nothing_is_taken() -> None:
    more = {"dropout": 0.0, "is_causal": True, "position_ids": torch.zeros(1), "indices": None}
    assert one_token(context=ONE, **more)[0].shape == (1, 1, 1, 4)


def test_a_layer_that_was_not_recorded_is_refused() -> None:
    x = torch.ones(1, 1, 1, 4)
    with pytest.raises(ValueError, match="this Linear was not recorded; load its model by millrace.models"):
        attention(nn.Linear(1, 1), x, x, x, None, context=ONE)


@pytest.mark.parametrize(("scaling", "scale"), [(None, 0.5), (0.3, 0.3)])
def test_scores_are_scaled_by_the_head_width_unless_the_layer_says_otherwise(
    scaling: float | None, scale: float
) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    segments = Segments.of(torch.tensor([5]))
    out, _ = attention(Layer(), query, key, value, None, context=Packed(segments), scaling=scaling)
    query_THK, key_TJK, value_TJK = (x[0].transpose(0, 1) for x in (query, key, value))
    expected = packed_attention(query_THK, key_TJK, value_TJK, segments, scale=scale)
    assert out.shape == (1, 5, 2, 4)
    assert torch.equal(out[0], expected)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("architecture", SHAPES)
def test_prefill_then_decode_equals_one_packed_forward(architecture: str) -> None:
    """Three rows of different lengths, each continued by four tokens that are fed one at a time."""
    model = tiny_model(architecture)
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 2, 5]
    rows = [torch.randint(0, 40, (n + 4,), generator=generator) for n in lengths]
    with torch.no_grad():
        whole = []
        for row in rows:
            context = Packed(Segments.of(torch.tensor([len(row)])))
            whole.append(hidden_states(model, row, torch.arange(len(row)), context))
        like = next(model.parameters())
        cache = DenseCache(facts_of(model), num_rows=3, num_slots=9, like=like)
        slot_T = torch.cat([torch.arange(n) for n in lengths])
        row_T = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        prompt_T = torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])
        context = Prefill(Packed(Segments.of(torch.tensor(lengths))), cache, row_T, slot_T)
        prefilled = hidden_states(model, prompt_T, slot_T, context).split(lengths)
        for part, row, n in zip(prefilled, whole, lengths, strict=True):
            close_fp32(part, row[:n], atol=1e-5)
        order = torch.tensor([2, 0, 1])  # rows may be taken in any order
        cache.take(order, 13)
        for step in range(4):
            position_B = torch.tensor(lengths)[order] + step
            token_B = torch.stack([rows[b][lengths[b] + step] for b in order.tolist()])
            hidden_BD = hidden_states(model, token_B, position_B, Decode(cache, position_B))
            expected = torch.stack([whole[b][lengths[b] + step] for b in order.tolist()])
            close_fp32(hidden_BD, expected, atol=1e-5)


def test_a_cache_takes_rows_twice_and_grows_and_shrinks() -> None:
    model = tiny_model("llama")
    cache = DenseCache(facts_of(model), num_rows=2, num_slots=3, like=torch.zeros(1, dtype=torch.float64))
    assert len(cache.keys) == 2 and cache.keys[0].shape == (2, 2, 3, 8)
    assert cache.keys[0].dtype == torch.float64
    key_NJK = torch.arange(32.0, dtype=torch.float64).view(2, 2, 8)
    cache.write(1, torch.tensor([1, 0]), torch.tensor([2, 0]), key_NJK, -key_NJK)
    assert torch.equal(cache.keys[1][1, :, 2], key_NJK[0]) and torch.equal(cache.keys[1][0, :, 0], key_NJK[1])
    assert torch.equal(cache.values[1], -cache.keys[1]) and cache.keys[0].eq(0).all()
    before = cache.keys[1]
    cache.take(torch.tensor([1, 1, 0]), 5)
    assert torch.equal(cache.keys[1][:, :, :3], before[[1, 1, 0]]) and cache.keys[1][:, :, 3:].eq(0).all()
    cache.take(torch.tensor([0, 1, 2]), 6)
    assert cache.keys[1].shape[2] == cache.values[0].shape[2] == 6
    cache.take(torch.tensor([2]), 1)
    assert torch.equal(cache.keys[1], before[[0], :, :1])
