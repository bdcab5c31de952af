from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.kernels import token_logprob as kernel
from millrace.kernels.token_logprob import Head, token_logprob, token_logprob_whole
from tests.close import close_bf16, close_fp32, close_fp64

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "double": {"scale": 2.0},
    "softcap": {"softcap": 1.5},
    "temperature": {"temperature": 0.7},
    "all": {"bias": True, "scale": 3.0, "softcap": 2.0, "temperature": 1.3},
}


def random_case(
    seed: int, dtype: torch.dtype, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(13, 5, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(17, 5, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(17, generator=generator, dtype=torch.float64)
    target_N = torch.randint(0, 17, (13,), generator=generator)
    hidden_ND, weight_VD, bias_V = (x.to(dtype).requires_grad_() for x in (hidden_ND, weight_VD, bias_V))
    return hidden_ND, Head(weight_VD, bias_V if bias else None, scale, softcap), target_N


def gradients(result: tuple[Tensor, Tensor], hidden_ND: Tensor, head: Head) -> tuple[Tensor, ...]:
    slope_N = torch.linspace(-1, 2, 13, dtype=result[0].dtype)
    inputs = [hidden_ND, head.weight_VD] + ([] if head.bias_V is None else [head.bias_V])
    return torch.autograd.grad((result[0] * slope_N).sum(), inputs)


@pytest.mark.parametrize("rows", [1, 3, 13, 100])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_chunks_equal_the_whole_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, seed: int, case: str, rows: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    hidden_ND, head, target_N = random_case(seed, torch.float64, **options)
    actual = token_logprob(hidden_ND, head, target_N, temperature=temperature)
    expected = token_logprob_whole(hidden_ND, head, target_N, temperature=temperature)
    close_fp64(actual[0], expected[0])
    close_fp64(actual[1], expected[1])
    pairs = zip(gradients(actual, hidden_ND, head), gradients(expected, hidden_ND, head), strict=True)
    for ours, theirs in pairs:
        close_fp64(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_float64(case: str) -> None:
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    found = []
    for dtype in (torch.float32, torch.float64):
        hidden_ND, head, target_N = random_case(7, dtype, **options)
        result = token_logprob(hidden_ND, head, target_N, temperature=temperature)
        assert result[0].dtype == result[1].dtype == dtype
        found.append([*result, *gradients(result, hidden_ND, head)])
    for single, double in zip(*found, strict=True):
        close_fp32(single, double, atol=1e-5)


def test_bfloat16_weights_give_float32_logprobs_and_bfloat16_gradients() -> None:
    hidden_ND, head, target_N = random_case(3, torch.bfloat16, bias=True)
    actual = token_logprob(hidden_ND, head, target_N, temperature=1.0)
    assert actual[0].dtype == torch.float32
    wide = Head(
        head.weight_VD.detach().double(), None if head.bias_V is None else head.bias_V.detach().double()
    )
    expected = token_logprob_whole(hidden_ND.detach().double(), wide, target_N, temperature=1.0)
    close_bf16(actual[0], expected[0], atol=0.02)
    parts = gradients(actual, hidden_ND, head)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    hidden_64, head_64, _ = random_case(3, torch.float64, bias=True)
    exact = gradients(token_logprob_whole(hidden_64, head_64, target_N, temperature=1.0), hidden_64, head_64)
    for part, whole in zip(parts, exact, strict=True):
        close_bf16(part, whole, atol=0.1)


def test_two_words_by_hand() -> None:
    head = Head(torch.tensor([[0.0], [math.log(3)]]))
    logprob_N, entropy_N = token_logprob(torch.ones(2, 1), head, torch.tensor([0, 1]), temperature=1.0)
    close_fp32(logprob_N, [math.log(0.25), math.log(0.75)])
    close_fp32(entropy_N, [-0.25 * math.log(0.25) - 0.75 * math.log(0.75)] * 2)
    cooler_N, _ = token_logprob(torch.ones(2, 1), head, torch.tensor([0, 1]), temperature=0.5)
    close_fp32(cooler_N, [math.log(0.1), math.log(0.9)])


def test_the_head_scales_then_caps() -> None:
    head = Head(torch.tensor([[1.0]]), torch.tensor([1.0]), scale=0.5, softcap=2.0)
    close_fp32(head.logits(torch.tensor([[3.0]])), [[2 * math.tanh(1.0)]])
    assert (
        Head(torch.ones(1, 1, dtype=torch.bfloat16)).logits(torch.ones(1, 1).bfloat16()).dtype
        == torch.float32
    )


def test_no_gradient_flows_through_the_entropy() -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    assert not token_logprob(hidden_ND, head, target_N, temperature=1.0)[1].requires_grad
    assert not token_logprob_whole(hidden_ND, head, target_N, temperature=1.0)[1].requires_grad


def test_no_tokens_give_no_logprobs_and_a_gradient_of_zero() -> None:
    weight_VD = torch.ones(4, 2, requires_grad=True)
    logprob_N, entropy_N = token_logprob(
        torch.zeros(0, 2, requires_grad=True),
        Head(weight_VD),
        torch.zeros(0, dtype=torch.long),
        temperature=1.0,
    )
    assert logprob_N.shape == entropy_N.shape == (0,)
    logprob_N.sum().backward()
    assert weight_VD.grad is not None and weight_VD.grad.eq(0).all()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(("elements", "held"), [(301, 300), (100, 100), (99, 100), (1, 100)])
def test_never_more_than_one_chunk_of_logits_is_held(
    monkeypatch: pytest.MonkeyPatch, elements: int, held: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", elements)
    hidden_ND = torch.linspace(-1, 1, 64)[:, None].requires_grad_()
    head = Head(torch.linspace(-1, 1, 100)[:, None].requires_grad_(), None, 0.5, 3.0)
    target_N = torch.zeros(64, dtype=torch.long)
    seen = []
    for function in (token_logprob, token_logprob_whole):
        with Largest() as largest:
            logprob_N, _ = function(hidden_ND, head, target_N, temperature=0.9)
            logprob_N.sum().backward()
        seen.append(largest.elements)
    # The twin shows that the measurement would see a whole [N, V].
    assert seen == [held, 6400]


def test_a_chunk_of_float32_logits_is_64_mebibytes() -> None:
    assert kernel.CHUNK_ELEMENTS * 4 == 64 * 2**20
