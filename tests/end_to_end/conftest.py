"""Engines of runs in the tests' own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked import Forked, forked_engines


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[list[Forked]]:
    """Those that this process has started in a test file; each starts at once."""
    with forked_engines() as started:
        yield started
