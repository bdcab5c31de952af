"""`millrace trace` writes what a viewer reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.event_logs import change_events


@pytest.mark.slow
def test_a_run_becomes_a_file_for_a_viewer(lab):
    lab.train()
    result = lab("trace", "runs/tiny-1")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("runs/tiny-1/trace.json: steps 1 to 2, ")
    assert result.out.endswith(" workers; open it in https://ui.perfetto.dev or chrome://tracing\n")
    found = json.loads(Path("runs/tiny-1/trace.json").read_text())["traceEvents"]
    slices = [one for one in found if one["ph"] == "X"]
    names = {one["args"]["name"] for one in found if one["name"] == "process_name"}
    assert names == {"trainer", "rewards", "engine-0"}
    trainer = {one["name"] for one in slices if one["pid"] == 1}
    assert {"sample", "score", "train", "weight_sync", "evaluate", "save"} <= trainer
    assert all(one["dur"] >= 0 for one in slices)


@pytest.mark.slow
def test_the_file_may_lie_elsewhere(lab):
    lab.train()
    assert lab("trace", "runs/tiny-1", "--output", "seen.json").code == 0
    assert json.loads(Path("seen.json").read_text())["traceEvents"]
    assert not Path("runs/tiny-1/trace.json").exists()


@pytest.mark.slow
def test_what_has_no_event_log_is_an_error(lab):
    result = lab("trace", "nowhere")
    assert (result.code, result.err) == (1, "error: nowhere is not a run folder (it has no recipe.yaml)\n")
    lab.train()
    path = Path("runs/tiny-1/events.log")
    change_events(path, lambda lines: [line for line in lines if '"dispatch"' not in line])
    old = "its event log has no dispatch"
    result = lab("trace", "runs/tiny-1")
    assert (result.code, result.out, result.err) == (1, "", f"error: run runs/tiny-1: {old}\n")
    path.unlink()
    result = lab("trace", "runs/tiny-1")
    assert (result.code, result.out) == (1, "")
    assert result.err == "error: run runs/tiny-1 has no event log: it has not come to its first batch\n"


@pytest.mark.slow
def test_a_range_of_steps_is_traced_and_of_a_long_run_the_latest(lab, monkeypatch):
    lab.train()

    def batches(*words: str) -> tuple[str, list[str]]:
        result = lab("trace", "runs/tiny-1", *words)
        assert result.code == 0, result.err
        found = json.loads(Path("runs/tiny-1/trace.json").read_text())["traceEvents"]
        return result.out, [one["name"] for one in found if one["name"].startswith("take batch")]

    assert batches("--steps", "1:2")[1] == ["take batch 0", "take batch 1"]
    assert batches("--steps", "2")[1] == ["take batch 1"]
    assert batches("--steps", "1")[1] == ["take batch 0"]
    monkeypatch.setattr("millrace.cli.trace.MOST_TURNS", 1)
    out, taken = batches()
    assert taken == ["take batch 1"]
    left_out = "steps 1 to 1 are left out; choose others with --steps FIRST:LAST, or all with --steps 1:2\n"
    assert out.endswith(left_out)


def test_a_range_that_is_none_or_not_there_is_an_error(lab):
    lab.train()
    result = lab("trace", "runs/tiny-1", "--steps", "5:9")
    assert (result.code, result.out) == (1, "")
    assert result.err == ("error: run runs/tiny-1: the event log has 2 steps, so none is from 5 to 9\n")
    result = lab("trace", "runs/tiny-1", "--steps", "9:5")
    assert result.code == 2
    assert "'9:5' is no range of steps such as 10:20" in result.err
