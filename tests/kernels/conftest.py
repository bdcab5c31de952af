"""What tests of several kernels need."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture
def fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter whose sums have one order on every processor.

    It multiplies by numpy's BLAS, which on some processors adds up a row in another order when there are
    other rows beside it.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
        sums = np.zeros_like(d.data)
        for k in range(a.data.shape[1]):
            sums += a.data[:, k : k + 1].astype(sums.dtype) * b.data[k].astype(sums.dtype)
        return TensorHandle(sums + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
