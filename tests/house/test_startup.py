"""How long a user waits before anything happens. Measured: the one speed that a test asserts."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.house.source import PACKAGE, ROOT

TRIES = 5
HEAVY = ("ray", "transformers", "triton", "numba", "torch")
MAX_IMPORT_S = 0.3
MAX_HELP_S = 1.0


def python(code: str, *words: str, path: str = str(ROOT)) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy_imports(module: str, path: str = str(ROOT)) -> list[str]:
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    loaded = {name.split(".")[0] for name in python(code, module, path=path).split()}
    return sorted(loaded & set(HEAVY))


def import_time_s(module: str, path: str = str(ROOT)) -> float:
    """The best of several, since the first one reads a cold disk."""
    code = (
        "import sys, time; t = time.perf_counter(); __import__(sys.argv[1]); print(time.perf_counter() - t)"
    )
    return min(float(python(code, module, path=path)) for _ in range(TRIES))


def test_import_millrace_brings_nothing_heavy():
    assert heavy_imports("millrace") == []


def test_import_millrace_is_instant():
    assert import_time_s("millrace") < MAX_IMPORT_S


def test_help_is_quick():
    if not (PACKAGE / "cli" / "main.py").exists():
        pytest.skip("millrace/cli/main.py is not there yet")
    code = "from millrace.cli.main import main; main()"
    best = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        shown = python(code, "--help")
        best = min(best, time.perf_counter() - start)
    assert "train" in shown
    assert best < MAX_HELP_S


def test_a_heavy_import_and_a_slow_one_are_found(tmp_path):
    (tmp_path / "slow.py").write_text("import numba\nimport time\ntime.sleep(0.31)\n")
    (tmp_path / "numba.py").write_text("")
    assert heavy_imports("slow", str(tmp_path)) == ["numba"]
    assert import_time_s("slow", str(tmp_path)) > MAX_IMPORT_S
