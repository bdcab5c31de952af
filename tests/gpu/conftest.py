"""Tests of this folder check the kernels, so they run them."""

from __future__ import annotations

import pytest

from millrace.kernels import dispatch


@pytest.fixture(autouse=True)
def _checked_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "is_checked", lambda kernel, device: True)
