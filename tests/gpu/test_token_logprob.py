"""Log-probabilities without logits as they run for real: tensor cores, large blocks, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millrace.kernels.head import Head
from millrace.kernels.token_logprob import token_logprob
from tests.close import close_bf16, close_fp32
from tests.kernels.slow_twins import token_logprob_whole

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


def case(
    size: tuple[int, int, int], dtype: torch.dtype, softcap: float | None = None
) -> tuple[Tensor, Head, Tensor]:
    num_tokens, num_words, width = size
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_ND = torch.randn(num_tokens, width, generator=generator, device="cuda").to(dtype)
    weight_VD = (torch.randn(num_words, width, generator=generator, device="cuda") / width**0.5).to(dtype)
    target_N = torch.randint(0, num_words, (num_tokens,), generator=generator, device="cuda")
    return hidden_ND.requires_grad_(), Head(weight_VD.requires_grad_(), softcap=softcap), target_N


def slopes_of(result: tuple[Tensor, Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    slope_N = torch.linspace(-1, 2, len(result[0]), device="cuda")
    return torch.autograd.grad((result[0] * slope_N - 0.7 * result[1] * slope_N.flip(0)).sum(), inputs)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", [(1, 300, 64), (1000, 5001, 200), (9000, 9000, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gpu_gives_what_float64_gives(
    dtype: torch.dtype, size: tuple[int, int, int], softcap: float | None
) -> None:
    hidden_ND, head, target_N = case(size, dtype, softcap)
    result = token_logprob(hidden_ND, head, target_N, temperature=0.7)
    found = slopes_of(result, [hidden_ND, head.weight_VD])
    wide_ND, wide_VD = (x.detach().double().requires_grad_() for x in (hidden_ND, head.weight_VD))
    exact = token_logprob_whole(wide_ND, Head(wide_VD, softcap=softcap), target_N, temperature=0.7)
    for one_N, exact_N in zip(result, exact, strict=True):
        close_fp32(one_N, exact_N, rtol=1e-5, atol=1e-4)
    for one, other in zip(found, slopes_of(exact, [wide_ND, wide_VD]), strict=True):
        if dtype == torch.float32:
            close_fp32(one, other, rtol=1e-3, atol=1e-4)
        else:
            # Sums over thousands of tokens cancel: the share of the whole gradient is what rounding bounds.
            difference = (one.double() - other).norm() / other.norm()
            close_bf16(difference, 0.0, atol=1e-2)


def test_the_same_numbers_and_gradients_come_every_time_and_a_token_has_its_own_in_any_batch() -> None:
    hidden_ND, head, target_N = case((3000, 20_000, 512), torch.bfloat16)
    runs = []
    for _ in range(2):
        result = token_logprob(hidden_ND, head, target_N, temperature=0.9)
        runs.append([*result, *slopes_of(result, [hidden_ND, head.weight_VD])])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    alone = token_logprob(hidden_ND[77:78], head, target_N[77:78], temperature=0.9)
    assert torch.equal(torch.stack(alone)[:, 0], torch.stack(runs[0][:2])[:, 77])


def test_extra_memory_is_a_twentieth_of_the_logits() -> None:
    hidden_ND, head, target_N = case((16_384, 152_064, 1024), torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprob_N, entropy_N = token_logprob(hidden_ND, head, target_N, temperature=1.0)
    (logprob_N.sum() + entropy_N.sum()).backward()
    of_gradients = 2 * (hidden_ND.numel() + head.weight_VD.numel())
    extra = torch.cuda.max_memory_allocated() - before - of_gradients
    assert extra < 16_384 * 152_064 * 4 / 20
