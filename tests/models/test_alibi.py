"""Columns that stand in for ALiBi give transformers' biases, at any position and in any dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.mpt import modeling_mpt

from millrace.kernels.dispatch import paged_attention, store_kv
from millrace.kernels.packed_attention import Segments, packed_attention
from millrace.kernels.paged_attention import new_pool
from millrace.models.alibi import COLUMNS, Columns, linear_columns, rounded_columns, with_columns
from millrace.models.attention import Packed, contiguous_rows
from millrace.models.logprobs import hidden_states
from millrace.models.own_attention import plain_implementation
from tests.close import close_bf16, close_fp32, close_fp64
from tests.models.families import bold_family, config_of, plain_logprobs, plain_twin

SCALE = 80**-0.5
# Of three heads: steep and no power of two, a power of two, shallow.
SLOPE_H = torch.tensor([0.5**0.5, 2.0**-4, 2.0**-8 * 0.9])
# Near each other, far apart, and on both sides of the places where a digit of the position turns.
POSITIONS = torch.tensor([0, 1, 255, 256, 257, 4095, 8191, 65535, 65536, 65537, 1_000_003])


def biases(columns: Columns) -> Tensor:
    """The bias of each pair of tokens less that of a token with itself, [H, T, T]."""
    query_HTC, key_JTC = (x.double() for x in columns)
    bias_HTT = query_HTC @ key_JTC.transpose(1, 2)
    return bias_HTT - bias_HTT.diagonal(dim1=1, dim2=2)[:, :, None]


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 2.0**-16)]
)
def test_a_bias_is_the_slope_times_the_distance(dtype: torch.dtype, most: float) -> None:
    distance_TT = (POSITIONS[None, :] - POSITIONS[:, None]).double()
    found_HTT = biases(linear_columns(POSITIONS, SLOPE_H, scale=SCALE, dtype=dtype)) * SCALE
    expected_HTT = SLOPE_H.double()[:, None, None] * distance_TT
    # Sums of float64 beside what a slope is off by, which is relative.
    close_fp64(found_HTT, expected_HTT, rtol=most, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_of_keys_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    _, key_1TC = linear_columns(POSITIONS, SLOPE_H, scale=SCALE, dtype=dtype)
    assert key_1TC.shape == (1, len(POSITIONS), COLUMNS) and key_1TC.dtype == dtype
    assert torch.equal(key_1TC[0, :, 2:5].long().sum(-1), POSITIONS)
    assert torch.equal(key_1TC[0, :, 5:], key_1TC[0, :, 2:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_biases_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Falcon computes its bias in bfloat16, which is rounded from position 257 on."""
    bias_HT = build_alibi_tensor(torch.ones(1, 700, dtype=torch.long), 6, torch.bfloat16)[:, 0]
    found_HTT = biases(rounded_columns(bias_HT, dtype=dtype))
    assert torch.equal(found_HTT, bias_HT.double()[:, None, :] - bias_HT.double()[:, :, None])


def long_heads(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, len(SLOPE_H), length, 16, generator=generator) for _ in range(3))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def exact_attention(heads: tuple[Tensor, Tensor, Tensor], num_last: int) -> Tensor:
    """Attention with ALiBi of the last tokens in float64, [N, H, K]."""
    query, key, value = (x[0].double() for x in heads)
    position_T = torch.arange(query.shape[1])
    distance_NT = (position_T - position_T[-num_last:, None]).double()
    score_HNT = query[:, -num_last:] @ key.transpose(1, 2) * SCALE
    score_HNT += SLOPE_H.double()[:, None, None] * distance_NT
    score_HNT = score_HNT.masked_fill(distance_NT > 0, float("-inf"))
    return (score_HNT.softmax(-1) @ value).transpose(0, 1)


def packed(query_THK: Tensor, key_THK: Tensor, value_THK: Tensor) -> Tensor:
    segments = Segments.of(torch.tensor([len(query_THK)]))
    return packed_attention(query_THK, key_THK, value_THK, segments, scale=SCALE)


def paged(query_THK: Tensor, key_THK: Tensor, value_THK: Tensor) -> Tensor:
    rows = contiguous_rows(torch.tensor([len(query_THK)]), block_size=16, device=query_THK.device)
    _, num_heads, width = key_THK.shape
    pools = new_pool(len(query_THK) // 16, num_heads, 16, width, dtype=key_THK.dtype, device=key_THK.device)
    store_kv(key_THK, value_THK, *pools, rows.slot_T)
    return paged_attention(query_THK, *pools, rows, scale=SCALE)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("attend", [packed, paged])
@pytest.mark.parametrize(
    ("dtype", "close"),
    [(torch.float32, lambda x, y: close_fp32(x, y, rtol=1e-5, atol=5e-6)), (torch.bfloat16, close_bf16)],
)
def test_a_long_row_is_as_exact_as_a_short_one(
    attend: Callable[..., Tensor], dtype: torch.dtype, close: Callable[..., None]
) -> None:
    """A bias reaches 2,896 here: float32 has steps of .0002 there, and bfloat16 of 16."""
    heads, length = long_heads(4096, dtype), 4096
    columns = linear_columns(torch.arange(length), SLOPE_H, scale=SCALE, dtype=dtype)
    laid = (x[0].transpose(0, 1) for x in with_columns(heads, columns))
    found_THK = attend(*laid)[..., :-COLUMNS]
    close(found_THK[-20:], exact_attention(heads, 20))


def test_one_key_head_is_repeated_for_biases_of_several() -> None:
    query, key, value = torch.randn(1, 4, 5, 6), torch.randn(1, 1, 5, 6), torch.randn(1, 1, 5, 6)
    columns = rounded_columns(torch.arange(20.0).view(4, 5), dtype=torch.float32)
    query, key, value = with_columns((query, key, value), columns)
    assert query.shape == key.shape == value.shape == (1, 4, 5, 6 + COLUMNS)
    assert torch.equal(key[0, 0, :, COLUMNS:], key[0, 3, :, COLUMNS:])
    assert torch.equal(key[0, 3, :, 1], torch.arange(15.0, 20.0)) and not value[..., 6:].any()


def test_the_eager_attention_of_falcon_adds_alibi_twice() -> None:
    """The reason to compare with another one; where this fails, `plain_implementation` may go."""
    model = bold_family("falcon@alibi")
    assert plain_implementation(model.config) == "sdpa" and plain_implementation(config_of("mpt")) == "eager"
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    row = torch.arange(1, 30)
    with torch.no_grad():
        apart = plain_logprobs(eager, row) - plain_logprobs(plain_twin(model), row)
    assert apart.abs().max() > 0.1


def test_columns_are_made_once_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = bold_family("mpt"), []
    own = modeling_mpt.build_mpt_alibi_tensor

    def counted(*args: int, **kwargs: torch.device) -> Tensor:
        calls.append(args)
        return own(*args, **kwargs)

    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", counted)
    hidden_states(model, torch.arange(1, 9), torch.arange(8), Packed(Segments.of(torch.tensor([8]))))
    # The model's own, of its longest sequence, and ours.
    assert [args[1] for args in calls] == [256, 2]
