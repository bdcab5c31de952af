"""The Triton kernels against their torch twin: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import dispatch
from millrace.kernels import token_logprob_triton as gpu
from millrace.kernels.head import Head, Supports
from millrace.kernels.token_logprob import token_logprob
from millrace.kernels.token_logprob_parts import merged
from tests.close import close_bf16, close_fp32
from tests.kernels.heads import CASES, Made, leaves
from tests.kernels.slow_twins import token_logprob_whole

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
# Tokens, words, width: one of each; below, at and beyond a tile and a step; several parts.
SIZES = [(1, 1, 1), (64, 128, 32), (65, 129, 33), (9, 700, 5), (70, 300, 31)]


def case(
    seed: int,
    size: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    **quirks: Any,
) -> tuple[Tensor, Head, Tensor]:
    num_tokens, num_words, width = size
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(num_tokens, width, generator=generator)
    weight_VD = torch.randn(num_words, width, generator=generator) * 2 / width**0.5
    bias_V = torch.randn(num_words, generator=generator)
    target_N = torch.randint(0, num_words, (num_tokens,), generator=generator).to(DEVICE)
    hidden_ND, weight_VD, bias_V = (
        x.to(DEVICE, dtype).requires_grad_() for x in (hidden_ND, weight_VD, bias_V)
    )
    return hidden_ND, Head(weight_VD, bias_V if bias else None, **quirks), target_N


def slopes_of(
    result: tuple[Tensor, ...], inputs: list[Tensor], lean: tuple[float, float] = (1.0, -0.7)
) -> tuple[Tensor, ...]:
    """Gradients of an uneven mix of both numbers; one whose share is 0 is left out of the loss."""
    slope_N = torch.linspace(-1, 2, len(result[0]), dtype=result[0].dtype, device=DEVICE)
    parts = [(share * x_N * slope_N).sum() for share, x_N in zip(lean, result, strict=True) if share]
    return torch.autograd.grad(torch.stack(parts).sum(), inputs)


def exact(
    hidden_ND: Tensor, head: Head, target_N: Tensor, temperature: float, lean: tuple[float, float]
) -> list[Tensor]:
    """Numbers and gradients in float64."""
    wide_ND, *rest = (x.detach().double().requires_grad_() for x in leaves(hidden_ND, head))
    wide = replace(head, weight_VD=rest[0], bias_V=rest[1] if rest[1:] else None)
    result = token_logprob_whole(wide_ND, wide, target_N, temperature=temperature)
    return [*result, *slopes_of(result, leaves(wide_ND, wide), lean)]


# How much a loss takes of log-probability and entropy.
LEANS = [(1.0, 0.0), (0.0, 1.0), (1.0, -0.7)]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_twin(
    monkeypatch: pytest.MonkeyPatch, name: str, size: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(gpu, "BLOCK", (67, 290))
    monkeypatch.setattr(gpu, "PARTS", 2)
    quirks = dict(CASES[name])
    temperature = quirks.pop("temperature", 1.0)
    # Every case and every size has each of them.
    seed = (list(CASES).index(name) + SIZES.index(size)) % len(LEANS)
    lean = LEANS[seed]
    hidden_ND, head, target_N = case(seed, size, **quirks)
    result = gpu.token_logprob(hidden_ND, head, target_N, temperature=temperature)
    assert [x.dtype for x in result] == [torch.float32] * 2
    found = [*result, *slopes_of(result, leaves(hidden_ND, head), lean)]
    for one, other in zip(found, exact(hidden_ND, head, target_N, temperature, lean), strict=True):
        close_fp32(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_multiplied_exactly_and_only_slopes_are_rounded(dtype: torch.dtype) -> None:
    hidden_ND, head, target_N = case(3, (130, 300, 70), dtype, bias=True, scale=0.8, softcap=6.0)
    result = gpu.token_logprob(hidden_ND, head, target_N, temperature=0.7)
    expected = exact(hidden_ND, head, target_N, 0.7, (1.0, -0.7))
    for number_N, exact_N in zip(result, expected, strict=False):
        close_fp32(number_N, exact_N, atol=2e-5)
    found = slopes_of(result, leaves(hidden_ND, head))
    assert [x.dtype for x in found] == [dtype] * 3
    for one, other in zip(found, expected[2:], strict=True):
        close_bf16(one, other, atol=3e-2)


def test_other_strides_change_nothing() -> None:
    hidden_ND, head, target_N = case(0, (9, 140, 33))
    turned = head.weight_VD.detach().T.contiguous().T.requires_grad_()
    apart_ND = torch.stack([hidden_ND.detach(), -hidden_ND.detach()], 2)[:, :, 0].requires_grad_()
    found = []
    for inputs_ND, weight_VD in ((hidden_ND, head.weight_VD), (apart_ND, turned)):
        result = gpu.token_logprob(inputs_ND, Head(weight_VD), target_N, temperature=0.9)
        found.append([*result, *slopes_of(result, [inputs_ND, weight_VD])])
    assert turned.stride() == (1, 140) and apart_ND.stride() == (66, 2)
    for one, other in zip(*found, strict=True):
        close_fp32(one, other)


@pytest.mark.slow
def test_a_token_has_the_same_bits_in_any_batch() -> None:
    hidden_ND, head, target_N = case(1, (130, 700, 20))
    whole = gpu.token_logprob(hidden_ND, head, target_N, temperature=0.9)
    for n in (0, 64, 129):
        alone = gpu.token_logprob(hidden_ND[n : n + 1], head, target_N[n : n + 1], temperature=0.9)
        assert torch.equal(torch.stack(alone)[:, 0], torch.stack(whole)[:, n])


def test_parts_of_two_shards_are_merged_to_the_whole() -> None:
    hidden_ND, head, target_N = case(2, (40, 700, 20))
    hidden_ND, weight_VD = hidden_ND.detach(), head.weight_VD.detach()
    parts = [
        gpu._parts(hidden_ND, Head(weight_VD[rows]), target_N - rows.start, 0.7)
        for rows in (slice(0, 210), slice(210, 700))
    ]
    assert [part.shape[1] for part in parts] == [2, 4]
    (logprob_N, entropy_N), _ = merged(torch.cat(parts, 1), None)
    expected = exact(hidden_ND, head, target_N, 0.7, (1.0, 1.0))
    close_fp32(logprob_N, expected[0], atol=2e-5)
    close_fp32(entropy_N, expected[1], atol=2e-5)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("target", [-1, 140, 200, 256])
def test_a_target_beyond_the_words_has_log_probability_minus_infinity(target: int) -> None:
    hidden_ND, head, target_N = case(0, (5, 140, 8))
    expected = exact(hidden_ND, head, target_N, 1.0, (1.0, 0.0))
    target_N[3] = target
    logprob_N, entropy_N = gpu.token_logprob(hidden_ND, head, target_N, temperature=1.0)
    assert logprob_N[3] == -torch.inf
    close_fp32(logprob_N[:3], expected[0][:3], atol=2e-5)
    close_fp32(entropy_N, expected[1], atol=2e-5)


# The interpreter's numpy, which would rather not.
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_hidden_state_that_is_not_finite_spoils_only_its_own_token(bad: float) -> None:
    hidden_ND, head, target_N = case(0, (5, 140, 8))
    spoiled_ND = hidden_ND.detach().clone()
    spoiled_ND[2, 3] = bad
    for number_N in gpu.token_logprob(spoiled_ND, head, target_N, temperature=1.0):
        assert number_N.isnan().tolist() == [False, False, True, False, False]


def test_logits_far_apart_give_an_entropy_of_0_and_finite_gradients() -> None:
    weight_VD = torch.tensor([[-1e4], [1e4], [0.0]], device=DEVICE, requires_grad=True)
    hidden_ND, target_N = torch.ones(2, 1, device=DEVICE), torch.tensor([1, 0], device=DEVICE)
    result = gpu.token_logprob(hidden_ND, Head(weight_VD), target_N, temperature=1.0)
    close_fp32(result[0], [0.0, -2e4])
    close_fp32(result[1], [0.0, 0.0])
    (result[0] + result[1]).sum().backward()
    close_fp32(weight_VD.grad, [[1.0], [-1.0], [0.0]])


def test_no_token_gives_empty_results_and_a_gradient_of_0() -> None:
    _, head, _ = case(0, (1, 140, 8))
    nothing_ND = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    target_N = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    logprob_N, entropy_N = gpu.token_logprob(nothing_ND, head, target_N, temperature=1.0)
    assert logprob_N.shape == entropy_N.shape == (0,)
    (logprob_N.sum() + entropy_N.sum()).backward()
    assert head.weight_VD.grad is not None and head.weight_VD.grad.eq(0).all()


def test_a_frozen_head_gets_no_gradient_and_a_frozen_bias_none_either() -> None:
    hidden_ND, head, target_N = case(4, (20, 140, 8), bias=True)
    full = slopes_of(gpu.token_logprob(hidden_ND, head, target_N, temperature=0.7), [hidden_ND])
    head.weight_VD.requires_grad_(False)
    assert head.bias_V is not None
    head.bias_V.requires_grad_(False)
    result = gpu.token_logprob(hidden_ND, head, target_N, temperature=0.7)
    assert torch.equal(slopes_of(result, [hidden_ND])[0], full[0])
    assert head.weight_VD.grad is None and head.bias_V.grad is None


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("num_tokens", [100, 500])
def test_memory_does_not_grow_with_tokens_times_words(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    monkeypatch.setattr(gpu, "BLOCK", (100, 90))
    monkeypatch.setattr(gpu, "PARTS", 2)
    hidden_ND, head, target_N = case(0, (num_tokens, 270, 4))
    with Made() as made:
        sum(gpu.token_logprob(hidden_ND, head, target_N, temperature=0.9)).sum().backward()
    # A block of slopes, where the logits are 270 of each token. The interpreter copies it as bytes.
    assert made.largest == 100 * 90 * (4 if INTERPRETED else 1)


def test_the_door_opens_to_the_kernels_unless_a_support_or_a_tile_asks_for_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def fused(hidden_ND: Tensor, weight_VD: Tensor) -> Any:
        asked.append(weight_VD)
        return gpu.token_logprob

    monkeypatch.setattr(dispatch, "fused_logprob", fused)
    hidden_ND, head, target_N = case(0, (20, 140, 8))
    through = token_logprob(hidden_ND, head, target_N, temperature=0.7)
    direct = gpu.token_logprob(hidden_ND, head, target_N, temperature=0.7)
    assert torch.equal(torch.stack(through), torch.stack(direct))
    assert len(asked) == 1 and asked[0] is head.weight_VD
    whole = Supports(target_N[:0], torch.zeros_like(target_N))
    for other in (
        token_logprob(hidden_ND, head, target_N, temperature=0.7, support=whole),
        token_logprob(hidden_ND, replace(head, tile=4), target_N, temperature=0.7),
    ):
        close_fp32(torch.stack(other), torch.stack(direct), atol=2e-5)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="^temperature is 0; it must be above 0$"):
        token_logprob(hidden_ND, head, target_N, temperature=0)


def test_a_shard_counts_words_from_its_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_ND, head, target_N = case(5, (9, 40, 5))
    whole = gpu.token_logprob(hidden_ND, head, target_N, temperature=0.7)
    # A shard belongs to a group; here nobody else is in it.
    alone: Any = object()
    monkeypatch.setattr(gpu, "merged", lambda part_4SN, group: merged(part_4SN, None))
    shard = replace(head, group=alone, first_row=1000)
    shifted = gpu.token_logprob(hidden_ND, shard, target_N + 1000, temperature=0.7)
    for one, other in zip(whole, shifted, strict=True):
        assert torch.equal(one, other)
