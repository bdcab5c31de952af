"""The only door to tolerances in tests: compare numbers, with a ceiling nobody can lift.

Both sides are compared as float64 on the CPU. Shapes must agree; dtypes need not, so that a float32
result can be held against numbers written in the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from millrace.training.optimizer import WeightOptimizer, adamw

CEILING = 0.1


def close_fp64(
    actual: Any, expected: Any, *, rtol: float = 1e-10, atol: float = 1e-12, equal_nan: bool = False
) -> None:
    """Fail unless two float64 results agree.

    Args:
        actual: tensor, numpy array, number or nested list of numbers.
        expected: likewise, of the same shape.
        rtol: allowed difference relative to `expected`, at most 0.1.
        atol: allowed absolute difference, at most 0.1.
        equal_nan: let NaN equal NaN; otherwise NaN equals nothing.

    Raises:
        AssertionError: a shape or a number differs.
        ValueError: a tolerance is above 0.1 or negative.
    """
    _close(actual, expected, rtol, atol, equal_nan)


def close_fp32(
    actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6, equal_nan: bool = False
) -> None:
    """As `close_fp64`, for float32 results."""
    _close(actual, expected, rtol, atol, equal_nan)


def close_bf16(
    actual: Any, expected: Any, *, rtol: float = 1.6e-2, atol: float = 1e-3, equal_nan: bool = False
) -> None:
    """As `close_fp64`, for bfloat16 results (8 bits of mantissa)."""
    _close(actual, expected, rtol, atol, equal_nan)


CLOSE: dict[torch.dtype, Callable[..., None]] = {
    torch.bfloat16: close_bf16,
    torch.float32: close_fp32,
    torch.float64: close_fp64,
}


def close_as(dtype: torch.dtype, actual: Any, expected: Any, **tolerances: float) -> None:
    """By the tolerance of a dtype."""
    CLOSE[dtype](actual, expected, **tolerances)


def _close(actual: Any, expected: Any, rtol: float, atol: float, equal_nan: bool) -> None:
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not 0 <= tolerance <= CEILING:
            raise ValueError(
                f"{name} is {tolerance}; a tolerance lies between 0 and {CEILING}, or the test cannot fail"
            )
    torch.testing.assert_close(
        _float64(actual), _float64(expected), rtol=rtol, atol=atol, equal_nan=equal_nan
    )


def _float64(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().cpu()


def comparable_adamw(model: Any, **options: Any) -> WeightOptimizer:
    """`optimizer.adamw` with an eps above the rounding of gradients.

    With the usual eps, a gradient of nothing but rounding moves a weight as far as any other, and rounding
    differs between processors.
    """
    optimizer = adamw(model, **options)
    for group in optimizer.param_groups:
        group["eps"] = 1e-4
    return optimizer
