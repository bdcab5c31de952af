"""How soon a command begins: what it imports is counted, since seconds differ between machines."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millrace.config.recipe import load_recipe, to_yaml
from tests.house.source import ROOT

pytestmark = pytest.mark.world

HEAVY = ("ray", "transformers", "triton", "numba", "torch")
# 74 and 383 today, on Python 3.11.
MAX_MODULES, MAX_HELP_MODULES = 150, 600
LISTING = "import sys, atexit; atexit.register(lambda: print('\\n' + ' '.join(sys.modules)));"


def modules_after(code: str, *words: str, path: str = str(ROOT)) -> list[str]:
    """The modules that a fresh interpreter has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", LISTING + code, *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def heavy(modules: list[str]) -> list[str]:
    return sorted({name.split(".")[0] for name in modules} & set(HEAVY))


def test_import_millrace_brings_little_and_nothing_heavy():
    modules = modules_after("import millrace")
    assert heavy(modules) == []
    assert len(modules) < MAX_MODULES


def test_help_brings_nothing_heavy():
    modules = modules_after("from millrace.cli.main import main; main()", "--help")
    assert "millrace.cli.train" in modules
    assert heavy(modules) == []
    assert len(modules) < MAX_HELP_MODULES


@pytest.mark.slow
def test_solving_a_small_mdp_brings_nothing_heavy():
    words = ("foundations", "chain", "--episodes", "1")
    modules = modules_after("from millrace.cli.main import main; main()", *words)
    assert "millrace.foundations.agreement" in modules
    assert heavy(modules) == []


def test_a_task_of_ray_that_passes_a_signal_on_starts_at_once():
    """Its process imports the module; a rank must hear of Ctrl-C before the run has ended."""
    assert heavy(modules_after("import millrace.launchers.ray_ranks")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "module", "function", "needed"),
    # The store of local ranks is torch's.
    [("processes", "local_ranks", "run_ranks", ["torch"]), ("ray", "ray_ranks", "resume", [])],
)
def test_a_resumed_run_launches_its_ranks_at_once(launcher, module, function, needed, tmp_path):
    """What launches them computes nothing."""
    recipe = load_recipe("quickstart", {"mesh.dp_shard": 2, "mesh.launcher": launcher})
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    code = (
        f"from millrace.launchers import {module}; from millrace.cli.main import main\n"
        f"{module}.{function} = lambda *given, **more: sys.exit(0); main()"
    )
    modules = modules_after(code, "resume", str(tmp_path))
    assert f"millrace.launchers.{module}" in modules
    assert heavy(modules) == needed


def test_a_heavy_import_is_found(tmp_path):
    (tmp_path / "slow.py").write_text("import numba\n")
    (tmp_path / "numba.py").write_text("")
    modules = modules_after("import slow", path=str(tmp_path))
    assert heavy(modules) == ["numba"]
    assert "slow" in modules
