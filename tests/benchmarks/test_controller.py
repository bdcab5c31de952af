"""What the controller's benchmark counts; nothing here looks at a clock but its own."""

from __future__ import annotations

import itertools

import controller

from millrace.simulation.simulated_engine import Costs
from tests.close import close_fp64


def test_time_of_the_simulation_is_not_the_controllers(monkeypatch):
    ticks = itertools.count(step=4.0)
    monkeypatch.setattr(controller.time, "process_time", lambda: next(ticks))
    backend = controller.Watched(1, Costs())
    command = controller.timed(backend, lambda name: f"did {name}")
    assert [command("this"), command("that")] == ["did this", "did that"]
    close_fp64(backend.seconds, 8.0)


def test_a_run_is_whole(tmp_path):
    found = controller.measure(5, 64, tmp_path)
    assert found["in_flight"] == 64
    assert found["trajectories"] == controller.NUM_BATCHES * 4 * controller.NUM_SAMPLES
    assert 0 < found["controller_us_per_trajectory"] < 1e6
    assert 5 < found["log_bytes_per_trajectory"] < 100
