"""Durations are read from a run's own records: a simulated run is written down, and they are found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.errors import PlanError
from millrace.eventlog.log import read_events
from millrace.planner.durations import constant
from millrace.simulation import simulate as simulation
from millrace.simulation.calibrate import read_measured
from millrace.simulation.from_plan import measured_work
from millrace.simulation.simulate import simulate
from tests.close import close_fp64
from tests.event_logs import change_events, write_events
from tests.rollout.written import COSTS, OTHER_S, write_run


def test_a_synchronous_run_tells_its_durations_exactly(tmp_path, monkeypatch):
    """An engine that stood still between batches is not taken for a slow one."""
    run = write_run(tmp_path / "run", monkeypatch)
    found = read_measured(tmp_path / "run")
    service = found.costs.service
    close_fp64([service.step_s, service.row_s], [0.5, 0.03])
    # Five tokens of a prompt count as one.
    close_fp64(service.prompt_token_s, 5 * 0.2)
    close_fp64([found.costs.load_s(0.1), found.train_token_s(0.7), found.rest_s(0.3)], [1.25, 0.1, OTHER_S])
    close_fp64(found.train_s(1, 50, 0.5), 0.1 * 50 + OTHER_S)
    close_fp64(found.train_s(4, 50, 0.5), 0.1 * 50 / 4 + OTHER_S)
    assert (found.num_engines, found.num_ranks, found.num_batches, found.costs.slots) == (1, 1, 30, 60)
    later = run.steps[1:]
    close_fp64(found.step["wait_s"], sum(step.taken_s - step.begin_s for step in later) / 29)
    close_fp64(found.step["train_s"], sum(0.1 * step.num_tokens for step in later) / 29 + OTHER_S)
    lengths = sorted(found.costs.num_tokens((i + 0.5) / 360) for i in range(360))
    assert lengths == sorted(
        min(64, max(1, round(COSTS.num_tokens(simulation.share_of(seed))))) for seed in range(360)
    )


@pytest.mark.slow
def test_updates_in_flight_are_told_apart_from_steps(tmp_path, monkeypatch):
    """Answers tell whole steps, and an update comes in the middle of one: right to some percent."""
    write_run(tmp_path / "run", monkeypatch, staleness=2, steps=60, num_engines=2)
    found = read_measured(tmp_path / "run")
    service = found.costs.service
    close_fp64([service.step_s, service.row_s], [0.5, 0.03], rtol=0.1)
    close_fp64(found.costs.load_s(0.5), 1.25, rtol=0.1)
    assert found.num_engines == 2
    assert found.step["staleness"] > 1


def test_what_does_not_tell_its_durations_is_refused(tmp_path, monkeypatch):
    with pytest.raises(PlanError, match="is not a run folder"):
        read_measured(tmp_path)
    for name, given, said in (
        ("inline", {"processes": 0}, "run the recipe with engine.num_engines=1"),
        ("short", {"steps": 1}, "has finished 1 of the 2 batches of reinforcement that durations need"),
    ):
        write_run(tmp_path / name, monkeypatch, **given)
        with pytest.raises(PlanError, match=said):
            read_measured(tmp_path / name)
    write_run(tmp_path / "run", monkeypatch)
    (tmp_path / "run" / "events.log").unlink()
    with pytest.raises(PlanError, match=r"events\.log cannot be read"):
        read_measured(tmp_path / "run")
    write_run(tmp_path / "run", monkeypatch)
    (tmp_path / "run" / "metrics.jsonl").write_text("{\n", encoding="utf-8")
    with pytest.raises(PlanError, match="line 1 is not JSON"):
        read_measured(tmp_path / "run")


def test_a_log_that_does_not_say_what_was_asked_is_refused(tmp_path, monkeypatch):
    write_run(tmp_path / "run", monkeypatch)
    change_events(
        tmp_path / "run" / "events.log", lambda lines: [line for line in lines if '"dispatch"' not in line]
    )
    with pytest.raises(PlanError, match="has no dispatch; it is not whole"):
        read_measured(tmp_path / "run")


def test_too_few_answers_are_refused(tmp_path, monkeypatch):
    write_run(tmp_path / "run", monkeypatch)
    path = tmp_path / "run" / "events.log"
    lines = read_events(path)
    kept = [line for line in lines if line["kind"] != "completed" or line["number"] < 5]
    kept = [line for line in kept if line["kind"] != "finish" or line["number"] < 5]
    write_events(path, kept)
    with pytest.raises(PlanError, match="durations need 8 at least, so let it sample more"):
        read_measured(tmp_path / "run")


@pytest.mark.slow
def test_the_simulation_of_a_written_run_is_that_run(tmp_path, monkeypatch):
    """Closing the circle: durations that were read foresee the run they were read from."""
    for staleness in (0, 2):
        folder = tmp_path / str(staleness)
        write_run(folder, monkeypatch, staleness=staleness, steps=60)
        found = read_measured(folder)
        found = replace(found, rest_s=constant(0.0))
        work = measured_work(found.rollout, found.num_samples, found, staleness, 1, 1)
        run = simulate(work, num_batches=60, num_first=1, ends=True)
        close_fp64(run.step_s, found.step["step_s"] - OTHER_S, rtol=0.05)
