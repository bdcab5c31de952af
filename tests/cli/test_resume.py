"""A run that lost its process is taken up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_run_without_a_summary_is_finished_quietly(lab):
    lab.train()
    Path("runs/tiny-1/summary.json").unlink()
    result = lab("resume", "runs/tiny-1", "--quiet")
    assert (result.code, result.err) == (0, "")
    assert len(result.out.splitlines()) == 3
    assert json.loads(Path("runs/tiny-1/summary.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_a_recipe_of_an_older_millrace_says_which_key_is_gone(lab):
    lab.train()
    Path("runs/tiny-1/summary.json").unlink()
    recipe = Path("runs/tiny-1/recipe.yaml")
    recipe.write_text(f"{recipe.read_text()}zzz: 1\n")
    result = lab("resume", "runs/tiny-1")
    assert (result.code, result.err.splitlines()) == (
        2,
        ["error: recipe runs/tiny-1/recipe.yaml: unknown key zzz"],
    )
