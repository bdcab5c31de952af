"""What a run is at can be read from its folder, whoever left it in whatever state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.run.folder import RunFolder, RunFolderError
from millrace.run.status import read_status

TOLD = {
    "pid": 7,
    "at": {"stage": "reinforcement", "step": 3, "steps": 9},
    "waits": [{"owner": "run", "reason": "train to end", "waited_s": 2.0, "deadline_s": 60.0, "on": []}],
}


def a_run(path: Path, *, told: object = None, summary: object = None) -> RunFolder:
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    folder.recipe.write_text("", encoding="utf-8")
    for place, value in ((folder.status, told), (folder.summary, summary)):
        if value is not None:
            place.write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder"):
        read_status(tmp_path)


def test_a_run_that_is_at_work_says_where_it_stands_and_who_waits(tmp_path):
    folder = a_run(tmp_path, told=TOLD)
    folder.lock()
    found = read_status(tmp_path)
    folder.unlock()
    assert (found.state, found.pid, found.step) == ("running", 7, 3)
    assert found.lines() == [
        f"run {tmp_path}: running (process 7), reinforcement step 3 of 9",
        "  run waits for train to end since 2 s, at most 60 s",
    ]
    assert json.loads(json.dumps(found.tree()))["waits"][0]["owner"] == "run"


def test_a_run_that_has_said_nothing_yet_is_starting(tmp_path):
    folder = a_run(tmp_path)
    folder.lock()
    found = read_status(tmp_path)
    folder.unlock()
    assert found.lines() == [f"run {tmp_path}: starting"]


def test_a_resumed_run_is_not_what_its_old_summary_says(tmp_path):
    folder = a_run(tmp_path, told=TOLD, summary={"status": "interrupted", "warnings": []})
    folder.lock()
    found = read_status(tmp_path)
    folder.unlock()
    assert found.state == "running"


@pytest.mark.parametrize("told", [None, TOLD])
def test_a_run_whose_process_is_gone_without_a_word_was_killed(tmp_path, told):
    a_run(tmp_path, told=told)
    lines = read_status(tmp_path).lines()
    assert lines[0].startswith(f"run {tmp_path}: killed")
    assert lines[-1] == f"continue with: millrace resume {tmp_path}"


@pytest.mark.parametrize("told", [None, TOLD])
def test_a_run_that_failed_says_why(tmp_path, told):
    a_run(tmp_path, told=told, summary={"status": "failed", "warnings": ["early", "the run stalled"]})
    assert read_status(tmp_path).lines() == [
        f"run {tmp_path}: failed",
        "  the run stalled",
        f"continue with: millrace resume {tmp_path}",
    ]


def test_a_finished_run_needs_nothing_more(tmp_path):
    a_run(tmp_path, summary={"status": "finished", "warnings": ["something"]})
    assert read_status(tmp_path).lines() == [f"run {tmp_path}: finished"]


def test_reading_leaves_the_run_to_others(tmp_path):
    folder = a_run(tmp_path, summary={"status": "finished", "warnings": []})
    read_status(tmp_path)
    folder.lock()
    assert read_status(tmp_path).state == "starting"
    folder.unlock()


def test_a_run_says_by_name_what_its_evaluations_came_to(tmp_path):
    best = {"value": 0.5, "checkpoint": "step-000002"}
    at = TOLD["at"] | {"measured": {"measure": "reward/mean", "value": 0.25, "best": best}}
    folder = a_run(tmp_path, told=TOLD | {"at": at})
    folder.lock()
    found = read_status(tmp_path)
    folder.unlock()
    assert found.lines()[1] == "  mean reward on held-out prompts: 0.250, best 0.500 (step-000002)"
    assert found.tree()["measured"] == at["measured"]
    summary = {"status": "finished", "measure": "accuracy", "eval_after": 0.75, "eval_best": 0.75}
    (tmp_path / "status.json").unlink()
    a_run(tmp_path, summary=summary | {"best_checkpoint": "step-000009"})
    assert (
        read_status(tmp_path).lines()[1] == "  accuracy on held-out prompts: 0.750, best 0.750 (step-000009)"
    )
