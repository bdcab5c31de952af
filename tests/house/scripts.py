"""The scripts of this project as modules, for tests of their functions."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.house.source import ROOT


def load_script(name: str) -> ModuleType:
    """The module of scripts/NAME.py, run once for each call."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    folder = str(ROOT / "scripts")  # where one script finds another
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module
