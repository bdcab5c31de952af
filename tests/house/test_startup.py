"""How long a user waits before anything happens. Measured: the one speed that a test asserts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

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
    """Of the processor's time, which other processes do not take: the best of several."""
    code = "import sys, time as t; s = t.process_time(); __import__(sys.argv[1]); print(t.process_time() - s)"
    return min(float(python(code, module, path=path)) for _ in range(TRIES))


def children_s() -> float:
    """What ended child processes took of the processor's time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
        start_s = children_s()
        shown = python(code, "--help")
        best = min(best, children_s() - start_s)
    assert "train" in shown
    assert best < MAX_HELP_S


def test_a_heavy_import_and_a_slow_one_are_found(tmp_path):
    (tmp_path / "slow.py").write_text("import numba\nimport time\nwhile time.process_time() < 0.6: pass\n")
    (tmp_path / "numba.py").write_text("")
    assert heavy_imports("slow", str(tmp_path)) == ["numba"]
    assert import_time_s("slow", str(tmp_path)) > MAX_IMPORT_S
