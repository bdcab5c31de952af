"""The official clients of model APIs, each imported at its first use.

A worker of xdist imports every test file, and these took two fifths of the time of all imports.
"""

from __future__ import annotations

import importlib
from typing import Any


class Client:
    """The package of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # Pytest looks for its marks at whatever a test file has.
        if name.startswith(("_", "pytest")):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic = Client("anthropic")
openai = Client("openai")
