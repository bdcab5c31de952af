"""Which log-probability runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millrace.kernels import dispatch, token_logprob_triton


@pytest.mark.parametrize(
    ("device", "dtype", "of_weight", "fused"),
    [
        ("unchecked", torch.bfloat16, torch.bfloat16, False),
        ("cuda", torch.bfloat16, torch.bfloat16, True),
        ("cuda", torch.float16, torch.float16, True),
        ("cuda", torch.float32, torch.float32, True),
        ("cuda", torch.bfloat16, torch.float32, False),
        ("cuda", torch.float64, torch.float64, False),
        ("cpu", torch.float32, torch.float32, False),
    ],
)
def test_the_kernels_run_on_cuda_for_one_narrow_dtype(
    device: str,
    dtype: torch.dtype,
    of_weight: torch.dtype,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "is_checked", lambda kernel, _: device == "cuda")
    place = torch.device("cuda" if device == "unchecked" else device)
    like: Any = type("Like", (), {"device": place, "dtype": dtype})()
    chosen = dispatch.fused_logprob(like, torch.ones(3, 2, dtype=of_weight))
    assert chosen is (token_logprob_triton.token_logprob if fused else None)
