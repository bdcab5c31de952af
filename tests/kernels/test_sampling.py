"""The door of sampling: which kernels run, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import sampling_cpu
from millrace.kernels.sampling import row_logprob, sample, truncate
from millrace.kernels.sampling_plain import sample_plain


def test_on_a_cpu_the_compiled_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("sample", "row_logprob", "truncate"):
        monkeypatch.setattr(sampling_cpu, name, lambda *args, name=name: calls.append((name, *args)) or name)
    logit_NV = torch.zeros(3, 4)[:, ::2].T
    half, one_N, zero_N = torch.full((2,), 0.5), torch.ones(2), torch.zeros(2, dtype=torch.int32)
    assert [sample(logit_NV, half, half), row_logprob(logit_NV, zero_N, half)] == ["sample", "row_logprob"]
    truncate(torch.zeros(2, 3), half, top_k_N=zero_N, top_p_N=one_N, min_p_N=half)
    assert [call[0] for call in calls] == ["sample", "row_logprob", "truncate"]
    assert all(call[1].is_contiguous() for call in calls)
    dtypes = [[column.dtype for column in call[2:]] for call in calls]
    single, double, integer = torch.float32, torch.float64, torch.int64
    assert dtypes == [[single, double], [integer, single], [single, integer, double, double]]


@pytest.mark.parametrize("shape", [(0, 5), (0, 700)])
def test_no_row_gives_empty_results(shape: tuple[int, int]) -> None:
    empty_N = torch.zeros(0, dtype=torch.float64)
    for drawn in (
        sample(torch.zeros(shape), empty_N, empty_N),
        sample_plain(torch.zeros(shape), empty_N, empty_N),
    ):
        assert [column.shape for column in drawn] == [(0,), (0,)]
    assert row_logprob(torch.zeros(shape), empty_N.long(), empty_N).shape == (0,)


def two(value: float = 0.5) -> Tensor:
    return torch.full((2,), value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sample(torch.zeros(3), two(), two()),
            "logit_NV is torch.float32 of shape (3,); "
            "expected float32 or float64 of shape (N, V) with V at least 1",
        ),
        (
            lambda: sample(torch.zeros(2, 0), two(), two()),
            "logit_NV is torch.float32 of shape (2, 0); "
            "expected float32 or float64 of shape (N, V) with V at least 1",
        ),
        (
            lambda: sample(torch.zeros(2, 3, dtype=torch.bfloat16), two(), two()),
            "logit_NV is torch.bfloat16 of shape (2, 3); "
            "expected float32 or float64 of shape (N, V) with V at least 1",
        ),
        (
            lambda: sample(torch.zeros(2, 3, requires_grad=True), two(), two()),
            "logit_NV requires a gradient, which sampling would drop; detach it",
        ),
        (
            lambda: sample(torch.zeros(2, 3), two(), torch.zeros(3)),
            "uniform_N has shape (3,); expected (2,), one for each row",
        ),
        (
            lambda: row_logprob(torch.zeros(2, 3), torch.tensor([1, 3]), two()),
            "target_N holds 3; the vocabulary has 3 tokens",
        ),
        (
            lambda: row_logprob(torch.zeros(2, 3), torch.tensor([-1, 0]), two()),
            "target_N holds -1; the vocabulary has 3 tokens",
        ),
        (
            lambda: truncate(torch.zeros(3, 2).T, two(), top_k_N=two().long(), top_p_N=two(), min_p_N=two()),
            "logit_NV has strides (1, 2); it is changed in place and must be contiguous",
        ),
        (
            lambda: truncate(
                torch.zeros(2, 3), two(), top_k_N=two().long(), top_p_N=two()[:1], min_p_N=two()
            ),
            "top_p_N has shape (1,); expected (2,), one for each row",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
