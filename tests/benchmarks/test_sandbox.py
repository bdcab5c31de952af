"""What the benchmark of sandboxes counts; nothing here looks at a clock but its own."""

from __future__ import annotations

import itertools

import pytest
import sandbox

from tests.close import close_fp64


def test_runs_are_timed_one_by_one(monkeypatch):
    ticks = itertools.accumulate(itertools.cycle([0.001, 0.004]))
    monkeypatch.setattr(sandbox.time, "perf_counter", lambda: next(ticks))
    found = sandbox.timed(lambda: sandbox.ANSWER, 100)
    close_fp64(
        [found["runs"], found["median_ms"], found["p99_ms"], found["runs_per_s"]], [100, 4.0, 4.0, 250.0]
    )


def test_a_wrong_answer_is_no_run():
    with pytest.raises(RuntimeError, match="printed something else"):
        sandbox.timed(lambda: "1693\n", 1)


@pytest.mark.world
def test_a_kind_is_measured():
    found = sandbox.measure("none", 3)
    assert found["runs"] == 3 and 0 < found["median_ms"] <= found["p99_ms"] and found["start_ms"] > 0
