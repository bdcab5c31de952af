"""Runs whose engines draw ahead of training, repeated bit for bit from their logs; and branches of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from millrace.eventlog.file import encode
from millrace.eventlog.log import check_log, read_events
from millrace.observability.files import read_json_lines
from millrace.replay.recorded_log import ReplayError
from millrace.replay.replay import Replay, replay
from millrace.run.run import Controller
from tests.end_to_end.async_runs import events_of, go_on, run
from tests.end_to_end.runs import check_equal
from tests.end_to_end.tiny import metrics_of, tiny_recipe, without_times
from tests.event_logs import write_events

AHEAD: dict[str, Any] = {"rollout.max_staleness": 2, "steps": 8, "engine.num_engines": 2}
# Longer answers, so that weights mostly arrive while they are drawn.
LONGER = {"rollout.max_tokens": 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the tiny recipe, and a run of it, `recompute`, whose sampling was ahead of training."""
    folder = tmp_path_factory.mktemp("replay")
    tiny_recipe(folder)
    assert run(folder, "recompute", **AHEAD, **LONGER).status == "finished"
    return folder


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{**event, "time_s": 0} for event in events_of(path)]


def check_repeats(path: Path) -> Replay:
    """Replay a run; fail unless all that it leaves behind is the same."""
    found = replay(path, quiet=True)
    assert timeless(found.run) == timeless(path)
    assert check_log(events_of(found.run)) == []
    assert found.num_records == len(metrics_of(path))
    # Its recipe is called another name.
    check_equal(found.run, path, but=("summary",))
    return found


@pytest.mark.slow
def test_a_run_ahead_of_training_is_repeated_bit_for_bit(folder):
    path = folder / "runs" / "recompute"
    assert max(record.get("staleness/max", 0) for record in metrics_of(path)) == 2
    found = check_repeats(path)
    assert found.num_batches == AHEAD["steps"]
    assert found.weights[-1] == "step-000008"


@pytest.mark.slow
def test_answers_drawn_with_the_keys_of_older_weights_are_repeated(folder):
    settings = {
        "rollout.kv_on_update": "keep",
        "rollout.batch_order": "completion",
        "rollout.stale_policy": "drop",
    }
    run(folder, "keep", **AHEAD, **LONGER, **settings)
    check_repeats(folder / "runs" / "keep")


@pytest.mark.slow
def test_a_run_that_lost_an_engine_was_left_and_taken_up_is_repeated(folder, engines, monkeypatch):
    record, killed = Controller.record, []

    def deadly(self, stage, numbers):
        record(self, stage, numbers)
        if stage == "reinforcement" and self.progress.step == 3 and not killed:
            killed.append(next(engine.pid for engine in engines if engine.poll() is None))
            os.kill(killed[0], signal.SIGKILL)
        if (stage, self.progress.step) == ("reinforcement", 10):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "record", deadly)
        assert run(folder, "lost", **AHEAD | LONGER | {"steps": 13}).status == "interrupted"
    assert go_on(folder, "lost").status == "finished"
    path = folder / "runs" / "lost"
    kinds = [event["kind"] for event in events_of(path)]
    assert kinds.count("engine_lost") == kinds.count("resume") == 1
    # In-flight requests were aborted for each checkpoint.
    assert kinds.count("abort_in_flight") == kinds.count("save") > 4
    check_repeats(path)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_waits_for_its_samples_is_repeated_too(processes, folder):
    name = f"waits-{processes}"
    run(folder, name, **{"steps": 3, "engine.num_engines": processes})
    check_repeats(folder / "runs" / name)


@pytest.mark.slow
def test_a_branch_is_the_run_until_its_setting_changes(folder):
    path = folder / "runs" / "recompute"
    changes = {"policy.optimizer.learning_rate": 0.05, "steps": 10}
    # Nothing was saved there.
    found = replay(path, from_step=3, changes=changes, name="branch", quiet=True)
    assert (found.num_batches, found.report.status, found.report.steps) == (3, "finished", 10)
    ours, theirs = (
        [record for record in without_times(metrics_of(one)) if record["stage"] == "reinforcement"]
        for one in (found.run, path)
    )
    assert ours[:3] == theirs[:3]
    rates = [record["policy/learning_rate"] for record in ours]
    assert len(ours) == 10 and min(rates[3:]) > 5 * max(rates[:3])
    assert check_log(events_of(found.run)) == []
    told = json.loads((found.run / "branch.json").read_text())
    assert told == {"run": str(path), "from_step": 3, "settings": changes}


@pytest.mark.slow
def test_a_killed_run_is_repeated_as_far_as_its_log_goes(folder):
    path = folder / "runs" / "killed"
    shutil.copytree(folder / "runs" / "recompute", path)
    (path / "summary.json").unlink()
    log = path / "events.log"
    events = read_events(log)
    takes = [place for place, event in enumerate(events) if event["kind"] == "take"]
    # In the middle of a block after the sixth batch.
    write_events(log, events[: takes[5] + 2])
    log.write_bytes(log.read_bytes() + encode(events[takes[5] + 2 :])[:-9])
    found = replay(path, quiet=True)
    assert found.num_batches == 5
    summary = json.loads((found.run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 5)


@pytest.mark.slow
def test_a_replay_that_is_not_the_run_says_where(folder):
    path = folder / "runs" / "other"
    shutil.copytree(folder / "runs" / "recompute", path)
    metrics = read_json_lines(path / "metrics.jsonl")
    place = next(i for i, record in enumerate(metrics) if record["stage"] == "reinforcement")
    loss = metrics[place]["policy/loss"]
    metrics[place]["policy/loss"] = 7.25
    text = "".join(json.dumps(record) + "\n" for record in metrics)
    (path / "metrics.jsonl").write_text(text)
    with pytest.raises(ReplayError) as caught:
        replay(path, quiet=True)
    assert str(caught.value) == (
        f"run {path}: reinforcement, step 1: policy/loss was 7.25 in the run and is {loss} in the replay"
    )
