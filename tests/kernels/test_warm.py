"""What `millrace warm` compiles, and that a run and its engine need nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.kernels import product_cpu, warm
from tests.house.source import PACKAGE, ROOT

# Files whose compiled functions are parts of others' only.
PARTS = {"compiled", "team", "product_tile"}
# In a fresh process with an empty folder for machine code: warm, then a whole run.
RUN = """
import sys
from pathlib import Path
from millrace.kernels.warm import GROUPS, counted, warm_group
first = [warm_group(name) for name in GROUPS]
assert sum(one.num_compiled for one in first) > 100, first
from millrace import train
from tests.end_to_end.tiny import tiny_recipe
with counted() as names:
    for dtype in ("float32", "bfloat16"):
        changes = {"name": dtype, "precision": dtype, "advantage.kind": "gae", "critic": {}}
        train(tiny_recipe(Path(sys.argv[1]), changes | {"rollout.top_p": 0.9}), recipe="tiny", quiet=True)
print("compiled:", *names)
"""


def test_every_file_of_kernels_has_its_group():
    files = {path.stem for path in (PACKAGE / "kernels").glob("*.py") if "\n@compiled" in path.read_text()}
    words = set(re.findall(r"\w+", (PACKAGE / "kernels" / "warm.py").read_text()))
    assert len(files - PARTS) > 5
    assert files - PARTS - words == set()


def test_a_group_is_compiled_once():
    for name in warm.GROUPS:
        warm.warm_group(name)
        assert warm.warm_group(name).num_compiled == 0, name


def test_what_is_compiled_is_counted():
    from numba import njit

    with warm.counted() as names:
        assert njit(lambda x: x + 1)(2) == 3
    (name,) = names
    assert name.startswith("tests.kernels.test_warm.test_what_is_compiled_is_counted")


def test_without_a_folder_for_them_the_sentence_says_what_to_set(monkeypatch):
    monkeypatch.setattr(product_cpu, "multiply", lambda: None)
    with pytest.raises(warm.KernelsNotKeptError, match="set NUMBA_CACHE_DIR to a folder that can$"):
        next(warm.warm(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_it_a_run_compiles_nothing(tmp_path: Path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "compiled:", done.stdout + done.stderr
