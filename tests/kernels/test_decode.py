from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millrace.kernels.decode import gated, norm_rotate
from tests.close import close_fp32


def random_parts(seed: int, heads: int, keys: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkv_TN = torch.randn(7, (heads + 2 * keys) * width, generator=generator)
    angle_TK = (torch.randn(7, width // 2, generator=generator) * 3).repeat(1, 2)
    return qkv_TN, angle_TK.cos(), angle_TK.sin()


def plain(x_TNK: Tensor, cos_TK: Tensor, sin_TK: Tensor, gain_K: Tensor | None, eps: float) -> Tensor:
    """The equations, one after the other."""
    if gain_K is not None:
        x_TNK = x_TNK / (x_TNK.square().mean(-1, keepdim=True) + eps).sqrt() * gain_K
    first, second = x_TNK.chunk(2, dim=-1)
    return x_TNK * cos_TK[:, None] + torch.cat([-second, first], -1) * sin_TK[:, None]


@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 2, 6), (3, 1, 8), (1, 1, 2)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_queries_and_keys_are_normed_and_turned(
    heads: int, keys: int, width: int, normed: bool, seed: int
) -> None:
    qkv_TN, cos_TK, sin_TK = random_parts(seed, heads, keys, width)
    gains = torch.linspace(0.5, 2, width), torch.linspace(-1, 3, width)
    ours = norm_rotate(qkv_TN, cos_TK, sin_TK, num_heads=heads, gains=gains if normed else None, eps=0.3)
    parts = qkv_TN.unflatten(1, (-1, width)).split([heads, keys, keys], dim=1)
    for one, x_TNK, gain_K in zip(ours, parts, gains, strict=False):
        expected_TNK = plain(x_TNK, cos_TK, sin_TK, gain_K if normed else None, 0.3)
        assert one.shape == expected_TNK.shape
        close_fp32(one, expected_TNK)


@pytest.mark.parametrize("seed", range(3))
def test_the_gate_opens_by_silu(seed: int) -> None:
    both_TN = torch.randn(5, 14, generator=torch.Generator().manual_seed(seed)) * 4
    gate_TF, up_TF = both_TN.chunk(2, dim=1)
    ours_TF = gated(both_TN)
    assert ours_TF.shape == (5, 7)
    close_fp32(ours_TF, torch.nn.functional.silu(gate_TF) * up_TF)


def test_gates_far_out_are_shut_or_open() -> None:
    both_TN = torch.tensor([[-1000.0, -80.0, 80.0, 0.0, 2.0, 2.0, 2.0, 2.0]])
    close_fp32(gated(both_TN), [[0.0, 0.0, 160.0, 0.0]])
    assert gated(torch.tensor([[float("nan"), 1.0]])).isnan().all()
