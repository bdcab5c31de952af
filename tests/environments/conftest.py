"""Sandboxes that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from millrace.environments.sandbox.execution import RunLimits, Sandbox
from millrace.environments.sandbox.open_sandbox import SandboxKind, open_sandbox
from millrace.processes.bubblewrap import find_bubblewrap


@pytest.fixture
def opened() -> Iterator[Callable[..., Sandbox]]:
    """Open sandboxes of a kind; the test is skipped where bubblewrap is asked for and not there."""
    made: list[Sandbox] = []

    def open_one(kind: SandboxKind = "bubblewrap", limits: RunLimits | None = None) -> Sandbox:
        if kind == "bubblewrap" and find_bubblewrap() is None:
            pytest.skip("bubblewrap is not installed, or this system does not let it work")
        made.append(open_sandbox(kind, limits))
        return made[-1]

    yield open_one
    for one in made:
        one.close()
