"""Sandboxes that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from millrace.environments.sandbox.execution import RunLimits, Sandbox
from millrace.environments.sandbox.open_sandbox import SandboxKind, open_sandbox
from millrace.environments.sandbox.wasm_interpreter import is_installed
from millrace.processes.bubblewrap import find_bubblewrap


@pytest.fixture
def needs_bubblewrap() -> None:
    """Skip the test where bubblewrap is not there."""
    if find_bubblewrap() is None:
        pytest.skip("bubblewrap is not installed, or this system does not let it work")


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[..., Sandbox]]:
    """Open sandboxes of a kind; the test is skipped where bubblewrap or wasm is asked for and not there."""
    made: list[Sandbox] = []

    def open_one(kind: SandboxKind = "bubblewrap", limits: RunLimits | None = None) -> Sandbox:
        if kind == "bubblewrap":
            request.getfixturevalue("needs_bubblewrap")
        if kind == "wasm" and not is_installed():
            pytest.skip("needs wasmtime and its CPython: pip install 'millrace-rl[wasm]'")
        made.append(open_sandbox(kind, limits))
        return made[-1]

    yield open_one
    for one in made:
        one.close()
