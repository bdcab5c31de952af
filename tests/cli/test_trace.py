"""`millrace trace` writes what a viewer reads."""

from __future__ import annotations

import json
from pathlib import Path


def test_a_run_becomes_a_file_for_a_viewer(lab):
    lab.train()
    result = lab("trace", "runs/tiny-1")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("runs/tiny-1/trace.json: ")
    assert result.out.endswith(" workers; open it in https://ui.perfetto.dev or chrome://tracing\n")
    found = json.loads(Path("runs/tiny-1/trace.json").read_text())["traceEvents"]
    slices = [one for one in found if one["ph"] == "X"]
    names = {one["args"]["name"] for one in found if one["name"] == "process_name"}
    assert names == {"trainer", "rewards", "engine-0"}
    trainer = {one["name"] for one in slices if one["pid"] == 1}
    assert {"sample", "score", "train", "sync", "evaluate", "save"} <= trainer
    assert all(one["dur"] >= 0 for one in slices)


def test_the_file_may_lie_elsewhere(lab):
    lab.train()
    assert lab("trace", "runs/tiny-1", "--output", "seen.json").code == 0
    assert json.loads(Path("seen.json").read_text())["traceEvents"]
    assert not Path("runs/tiny-1/trace.json").exists()


def test_what_has_no_event_log_is_an_error(lab):
    result = lab("trace", "nowhere")
    assert (result.code, result.err) == (1, "error: nowhere is not a run folder (it has no recipe.yaml)\n")
    lab.train()
    path = Path("runs/tiny-1/events.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"dispatch"' not in line))
    old = "its event log does not say what was asked of engines; an older millrace wrote it"
    result = lab("trace", "runs/tiny-1")
    assert (result.code, result.out, result.err) == (1, "", f"error: run runs/tiny-1: {old}\n")
    path.unlink()
    result = lab("trace", "runs/tiny-1")
    assert (result.code, result.out) == (1, "")
    assert result.err == "error: run runs/tiny-1 has no event log: it has not come to its first batch\n"
