from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.close import close_bf16, close_fp32, close_fp64

ALL = (close_fp64, close_fp32, close_bf16)


@pytest.mark.parametrize("close", ALL)
@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("tolerance", [0.11, 1e6, float("inf"), float("nan"), -1e-9])
def test_a_tolerance_that_cannot_fail_is_refused(close, name, tolerance):
    with pytest.raises(ValueError, match=rf"{name} is .*; a tolerance lies between 0 and 0.1"):
        close(1.0, 1.0, **{name: tolerance})


@pytest.mark.parametrize(
    ("close", "within", "beyond"),
    [(close_fp64, 1 + 5e-11, 1 + 5e-10), (close_fp32, 1 + 5e-6, 1 + 5e-5), (close_bf16, 1.01, 1.03)],
)
def test_each_precision_accepts_its_rounding_and_no_more(close, within, beyond):
    close(within, 1.0)
    with pytest.raises(AssertionError):
        close(beyond, 1.0)


@pytest.mark.parametrize("close", ALL)
def test_tensors_arrays_numbers_and_lists_compare_with_each_other(close):
    for one in (torch.tensor([1.0, 2.0], requires_grad=True), np.array([1, 2]), [1.0, 2.0]):
        close(one, np.array([1.0, 2.0]))
        with pytest.raises(AssertionError):
            close(one, [1.0, 2.5])


def test_a_number_does_not_stand_for_a_row():
    with pytest.raises(AssertionError, match="shape"):
        close_fp32(torch.ones(3), 1.0)


@pytest.mark.parametrize("close", ALL)
def test_nan_equals_nan_only_when_asked(close):
    nan = float("nan")
    with pytest.raises(AssertionError):
        close(nan, nan)
    close(nan, nan, equal_nan=True)
    with pytest.raises(AssertionError):
        close(nan, 1.0, equal_nan=True)
