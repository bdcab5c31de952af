"""Starting and resuming: what is refused, what is left behind, what is held."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace import resume, train
from millrace.engines.subprocesses import EngineFailed
from millrace.inference.engine import PagedEngine
from millrace.observability import watchdog
from millrace.observability.files import read_json_lines
from millrace.observability.watchdog import Watchdog
from millrace.run import checkpointing, launch, loop, run
from millrace.run.folder import RunFolder, RunFolderError
from millrace.run.health.health_checks import RunStopped
from millrace.run.run import Controller
from millrace.training.policy import PolicyTrainer
from tests.end_to_end.tiny import metrics_of, tiny_recipe, without_times


def free(path: Path) -> bool:
    """Whether nobody holds the lock of a run."""
    with RunFolder(path) as folder:
        folder.lock()
        return True


def test_a_recipe_that_cannot_run_leaves_no_folder(tmp_path):
    config = tiny_recipe(tmp_path, {"rollout.max_tokens": 48})
    with pytest.raises(ValueError) as caught:
        train(config, quiet=True)
    assert str(caught.value) == (
        "rollout.max_tokens is 48 but the model allows 48 tokens in all, prompt included; "
        "lower rollout.max_tokens"
    )
    assert not (tmp_path / "runs").exists()


def test_an_occupied_name_is_refused_and_the_run_there_is_untouched(tmp_path):
    train(tiny_recipe(tmp_path), quiet=True)
    folder = tmp_path / "runs" / "run"
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=f"run {folder} exists; choose another name, or continue it"):
        train(tiny_recipe(tmp_path), quiet=True)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_what_is_no_run_folder_is_not_resumed(tmp_path):
    with pytest.raises(RunFolderError) as caught:
        resume(tmp_path, quiet=True)
    assert str(caught.value) == f"{tmp_path} is not a run folder (it has no recipe.yaml)"


@pytest.mark.slow
def test_a_run_at_work_elsewhere_is_not_resumed(tmp_path):
    train(tiny_recipe(tmp_path), quiet=True)
    folder = tmp_path / "runs" / "run"
    with RunFolder(folder) as other:
        other.lock()
        with pytest.raises(RunFolderError) as caught:
            resume(folder, quiet=True)
        assert str(caught.value) == f"run {folder} is being trained by another process"
    assert free(folder)


@pytest.mark.slow
def test_a_finished_run_is_refused_and_given_back(tmp_path):
    train(tiny_recipe(tmp_path), quiet=True)
    folder = tmp_path / "runs" / "run"
    with pytest.raises(RunFolderError, match="is finished; look at .*report.html$") as caught:
        resume(folder, quiet=True)
    assert caught.value.__traceback__ is not None
    assert free(folder)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    config = tiny_recipe(tmp_path)
    whole = train(config, quiet=True)
    folder = tmp_path / "runs" / "run"
    records = metrics_of(whole.run)
    (folder / "summary.json").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    again = resume(folder, quiet=True)
    assert (again.status, len(metrics_of(folder))) == ("finished", len(records))


@pytest.mark.slow
def test_a_disk_that_fills_up_says_how_to_go_on_and_the_run_can_be_resumed(tmp_path, monkeypatch):
    config = tiny_recipe(tmp_path)
    folder = tmp_path / "runs" / "run"
    real = Controller.record

    def full(self, stage, numbers):
        if (stage, self.progress.step) == ("reinforcement", 3):
            raise OSError(28, "No space left on device")
        real(self, stage, numbers)

    with monkeypatch.context() as patch, pytest.raises(RunStopped) as caught:
        patch.setattr(Controller, "record", full)
        train(config, quiet=True)
    assert str(caught.value) == (
        f"run folder {folder} cannot be written: No space left on device; what was saved before is intact, "
        f"so make room and continue with: millrace resume {folder}"
    )
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert free(folder)
    assert resume(folder, quiet=True).status == "finished"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device"), "run folder runs/run cannot be written: No space"),
        (
            OSError(13, "Permission denied", "runs/run/best.json"),
            "run folder runs/run cannot be written: Pe",
        ),
        (
            OSError(13, "Permission denied", "/elsewhere"),
            "PermissionError: [Errno 13] Permission denied: ",
        ),
        (TimeoutError("timed out"), "TimeoutError: timed out; continue with: millrace resume runs/run"),
        (
            OSError(111, "Connection refused"),
            "ConnectionRefusedError: [Errno 111] Connection refused; ",
        ),
        (
            OSError(11, "Try again"),
            "BlockingIOError: [Errno 11] Try again; continue with: millrace ",
        ),
        (EngineFailed("waited 9 s"), "waited 9 s; continue with: millrace resume runs/run"),
        (ValueError("a bug"), "a bug"),
    ],
)
def test_what_ends_a_run_has_its_true_name(error, says):
    named = launch._named(error, RunFolder(Path("runs/run")), "continue with: millrace resume runs/run")
    assert str(named).startswith(says)
    assert isinstance(named, ValueError if says == "a bug" else RunStopped)


def test_a_rank_of_its_own_notes_names_the_folder_of_the_run(tmp_path):
    start = SimpleNamespace(fresh=False)
    folder = RunFolder(tmp_path, shared=Path("/runs/run"), rank=1)
    assert launch._go_on(start, folder) == "continue with: millrace resume /runs/run"


@pytest.mark.slow
def test_whoever_waits_for_ranks_or_the_disk_is_watched(tmp_path, monkeypatch):
    """Also after the run was left in the midst of writing: no checkpoint is whole before the run waits."""
    record, waiting, seal, told = Controller.record, Watchdog.waiting, checkpointing.seal_checkpoint, []
    waited = threading.Event()

    def leave(self, stage, numbers):
        record(self, stage, numbers)
        if (stage, self.progress.step) == ("reinforcement", 3):
            with self.ranks._waiting():
                told.append(self.console._waiting())
            raise KeyboardInterrupt

    def watched(self, owner, reason, *, deadline_s):
        told.append((owner, reason, deadline_s, self._thread.is_alive()))
        if "checkpoint" in reason:
            waited.set()
        return waiting(self, owner, reason, deadline_s=deadline_s)

    def slow(*arguments):
        assert waited.wait(60)
        waited.clear()
        seal(*arguments)

    monkeypatch.setattr(Controller, "record", leave)
    monkeypatch.setattr(Watchdog, "waiting", watched)
    monkeypatch.setattr(checkpointing, "seal_checkpoint", slow)
    monkeypatch.setattr(watchdog, "LONG_S", 0.0)
    config = tiny_recipe(tmp_path, {"timeouts.phase_s": 900, "checkpoint.every": 1})
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet=True)
    ranks, line, disk = told[-3:]
    assert ranks == ("trainer", "the other ranks", 900, True)
    assert re.fullmatch(r"waiting \d+ s of 900: trainer for the other ranks", line)
    assert disk == ("trainer", "a checkpoint to be on disk", 900, True)
    spans = read_json_lines(tmp_path / "runs" / "run" / "spans.jsonl")
    assert spans[0]["name"] == "score", "of the demonstrations"


def test_the_reason_of_a_failure_is_not_hidden_by_a_summary_that_cannot_be_written(tmp_path, monkeypatch):
    def broken(self, stage, numbers):
        raise RunStopped("the true reason")

    def unwritable(self, path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Controller, "record", broken)
    monkeypatch.setattr(RunFolder, "write_json", unwritable)
    with pytest.raises(RunStopped, match="^the true reason$"):
        train(tiny_recipe(tmp_path), quiet=True)


def test_workers_and_the_lock_are_given_back_also_when_a_tracker_cannot_start(tmp_path, monkeypatch):
    closed = []
    real = launch.build

    def build(config, checkpoint, ranks):
        parts = real(config, checkpoint, ranks)
        parts.exit_stack.callback(closed.append, True)
        return parts

    def tracker(start, folder):
        raise ValueError("no tracker here")

    monkeypatch.setattr(launch, "build", build)
    monkeypatch.setattr(launch, "_loggers", tracker)
    with pytest.raises(ValueError, match="^no tracker here$"):
        train(tiny_recipe(tmp_path), quiet=True)
    assert closed == [True]
    assert list((tmp_path / "runs").iterdir()) == [], "a failed start left a folder"


@pytest.mark.slow
def test_the_run_keeps_its_resolved_recipe_and_where_it_came_from(tmp_path):
    report = train(tiny_recipe(tmp_path, {"seed": 5}), recipe="mine", quiet=True)
    folder = Path(report.run)
    assert report.recipe == (folder / "origin.txt").read_text() == "mine"
    assert "seed: 5" in (folder / "recipe.yaml").read_text().splitlines()


@pytest.mark.slow
def test_tensorboard_gets_the_numbers_of_a_run_and_of_its_resumption(tmp_path):
    config = tiny_recipe(tmp_path, {"loggers": ["tensorboard"]})
    report = train(config, quiet=True)
    files = list((Path(report.run) / "tensorboard").rglob("events.*"))
    assert {path.parent.name for path in files} == {"sft", "reinforcement"}


@pytest.mark.slow
def test_a_run_that_is_not_quiet_shows_its_result(tmp_path, capsys):
    train(tiny_recipe(tmp_path), recipe="tiny", quiet=False)
    shown = capsys.readouterr().out + capsys.readouterr().err
    assert "rewards tried on 8 held-out reference answers: all earn full marks" in shown


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("overrides", "place", "saved"),
    [
        ({"sft": None}, ("generate", 1), []),  # the first evaluation
        ({"sft": None}, ("generate", 2), ["step-000000"]),  # the first batch
        ({}, ("forward_backward", 1), []),  # the first step of SFT
        # Evaluations after two and three steps of SFT and before reinforcement, then its first batch.
        ({}, ("generate", 4), ["sft-000003", "step-000000"]),
    ],
)
def test_a_signal_before_the_first_step_is_done_ends_the_run_in_its_midst(
    overrides, place, saved, tmp_path, monkeypatch
):
    name, number = place
    owner = PagedEngine if name == "generate" else PolicyTrainer
    real, calls = getattr(owner, name), []

    def interrupted(self, *arguments):
        calls.append(name)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the run goes on")
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        report = train(tiny_recipe(tmp_path, overrides), quiet=True)
    folder = Path(report.run)
    assert (report.status, report.steps, report.sft_steps) == ("interrupted", 0, 3 * (number == 4))
    assert sorted(path.name for path in folder.glob("checkpoints/[ws]*")) == saved
    assert free(folder)
    whole = train(tiny_recipe(tmp_path, overrides | {"name": "whole"}), quiet=True)
    resumed = resume(folder, quiet=True)
    assert (resumed.status, resumed.eval_after) == ("finished", whole.eval_after)
    assert without_times(metrics_of(folder)) == without_times(metrics_of(whole.run))


def test_a_signal_in_a_later_step_lets_it_be_finished(tmp_path, monkeypatch):
    real = PolicyTrainer.forward_backward
    calls = []

    def interrupted(self, *arguments):
        calls.append("step")
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(self, *arguments)

    monkeypatch.setattr(PolicyTrainer, "forward_backward", interrupted)
    report = train(tiny_recipe(tmp_path), quiet=True)
    assert (report.status, report.sft_steps) == ("interrupted", 2)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_start_that_fails_before_anything_is_recorded_leaves_no_folder(fresh, tmp_path, monkeypatch):
    """But a folder that was there before stays, whatever its resumption ends with."""
    config = tiny_recipe(tmp_path)
    folder = tmp_path / "runs" / "run"
    if not fresh:
        train(config, quiet=True)
        for path in (folder / "metrics.jsonl", folder / "summary.json"):
            path.unlink()
        shutil.rmtree(folder / "checkpoints")

    def gone(*arguments, **named):
        raise EngineFailed("the engine is gone")

    monkeypatch.setattr(run, "evaluate", gone)
    monkeypatch.setattr(loop, "build_stream", gone)
    with pytest.raises(RunStopped) as caught:
        train(config, quiet=True) if fresh else resume(folder, quiet=True)
    if fresh:
        end = f"nothing was recorded yet, so {folder} was removed; start it again with: millrace train"
    else:
        end = f"continue with: millrace resume {folder}"
    assert str(caught.value) == f"the engine is gone; {end}"
    assert folder.exists() is not fresh
