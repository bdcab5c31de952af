"""`millrace measure engine` writes the cost model of the engine of `millrace serve`."""

from __future__ import annotations

import json
import re

import pytest

from millrace.planner.engine_cost_file import read_cost


@pytest.mark.slow
def test_the_engine_of_a_run_is_measured(lab):
    assert lab.train("steps=1", "--quiet").code == 0
    # The model allows 64 tokens, so all loads take a second or two.
    result = lab(
        "measure", "engine", "runs/tiny-1", "--seconds", "600", "--device", "cpu", "--output", "c.json"
    )
    assert (result.code, result.err) == (0, "")
    assert re.search(r"^  +[\d.e-]+ \w+  for each request$", result.out, re.M)
    assert re.search(r"^  held out +[\d.]+% +[\d.]+% +\d+$", result.out, re.M)
    assert result.out.endswith("written to c.json\n")
    found = read_cost(lab.folder / "c.json")
    assert (found.engine.model_type, found.engine.dtype, found.num_skipped) == ("qwen3", "float32", 0)
    assert json.loads((lab.folder / "c.json").read_text())["seed"] == 0


def test_what_cannot_be_measured_or_written_is_refused(lab):
    result = lab("measure", "engine", "none")
    assert result.code in (1, 2) and result.err.startswith("error: ") and result.err.count("\n") == 1
    result = lab("measure", "engine", "none", "--output", "no/where.json")
    assert (result.code, result.err) == (
        2,
        "error: --output no/where.json cannot be written; name a file in a folder that exists\n",
    )
    assert lab("measure", "motor", "none").code == 2
