"""The Triton kernels as they run for real: many tiles at once, looking back at each other."""

from __future__ import annotations

import pytest
import torch

from millrace.kernels.dispatch import gae, linear_scan
from tests.close import CLOSE, close_as, close_fp32
from tests.kernels.packed_rows import random_rows

# Exact in float32: the kernel takes gamma in that precision, the CPU in float64, and over the thousand tokens
# that count the rounding of 0.999 adds up to 1e-5 of the result.
GAMMA = 1 - 2**-10
LENGTHS = {
    "equal": [131_072] * 16,
    "one": [3_000_001],
    "mixed": [1, 5_000, 0, 70_000, 2, 300, 1_000_000, 7] * 2,
    "single tokens": [1] * 200_000,
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("lengths", list(LENGTHS))
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_the_gpu_gives_what_the_cpu_gives(dtype: torch.dtype, lengths: str) -> None:
    rows = random_rows(1, dtype, lengths=LENGTHS[lengths])
    # Sums of 90 in float32 cancel to nearly nothing, which bfloat16 then rounds.
    atol = 1e-3 if dtype == torch.bfloat16 else 1e-4
    expected = gae(**rows.gae(), gamma=GAMMA, scan="numba")
    there = {name: given.cuda() for name, given in rows.gae().items()}
    # Which tile hears what from which differs from run to run; the result does not, up to rounding.
    for _ in range(20):
        for ours_T, cpu_T in zip(gae(**there, gamma=GAMMA), expected, strict=True):
            close_as(dtype, ours_T, cpu_T, atol=atol)
    for reverse in (True, False):
        cpu_T = linear_scan(*rows.scan(), reverse=reverse, scan="numba")
        cuda_T = linear_scan(rows.x_T.cuda(), rows.w_T.cuda(), reverse=reverse)
        close_as(dtype, cuda_T, cpu_T, atol=atol)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_nothing_is_forgotten_over_three_million_tokens() -> None:
    reward_T = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    rest_T = reward_T.double().flip(0).cumsum(0).flip(0)
    one_T = reward_T.cuda()
    advantage_T, _ = gae(one_T, torch.zeros_like(one_T), torch.tensor([3_000_001]), gamma=1, lam=1)
    close_fp32(advantage_T, rest_T, rtol=1e-4, atol=0.02)
