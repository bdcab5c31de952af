"""What is kept of a run: checkpoints, the best one, warnings, and the summary."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from millrace import resume, train
from millrace.run import run as controller
from millrace.run import train_step
from millrace.run.progress import versions
from millrace.run.run import Controller
from tests.end_to_end.tiny import metrics_of, tiny_recipe


def run(folder: Path, **overrides):
    return train(tiny_recipe(folder, overrides), quiet=True)


def pretend(monkeypatch, *rewards: float | dict[str, float]) -> None:
    """Let evaluations give these mean rewards, or these numbers, in order."""
    left, real = list(rewards), controller.evaluate

    def evaluate(*arguments, **named):
        found = real(*arguments, **named)
        numbers = left.pop(0)
        for name, value in (numbers if isinstance(numbers, dict) else {"reward": numbers}).items():
            object.__setattr__(found, name, value)
        return found

    monkeypatch.setattr(controller, "evaluate", evaluate)


def saved(report) -> list[str]:
    return sorted(path.name for path in (Path(report.run) / "checkpoints").iterdir())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("keep", "rewards", "left"),
    [
        # Before reinforcement, then after batches 2, 4, 6 and 8.
        (1, (0.5, 0.1, 0.9, 0.8, 0.7), ["step-000004", "step-000008"]),
        (2, (0.5, 0.1, 0.9, 0.8, 0.7), ["step-000004", "step-000006", "step-000008"]),
        (1, (0.5, 0.1, 0.2, 0.3, 0.9), ["step-000008"]),
        (1, (0.9, 0.8, 0.7, 0.6, 0.5), ["step-000000", "step-000008"]),
        (9, (0.9, 0.8, 0.7, 0.6, 0.5), [f"step-00000{n}" for n in (0, 2, 4, 6, 8)]),
    ],
)
def test_the_newest_checkpoints_and_the_best_are_kept(keep, rewards, left, tmp_path, monkeypatch):
    pretend(monkeypatch, *rewards)
    report = run(tmp_path, **{"sft": None, "steps": 8, "checkpoint.keep": keep})
    assert saved(report) == left
    best = f"step-{2 * rewards.index(max(rewards)):06d}"
    assert (report.best_checkpoint, report.eval_best) == (best, max(rewards))
    assert (report.measure, report.eval_before, report.eval_after) == ("reward/mean", rewards[0], rewards[-1])
    assert json.loads((Path(report.run) / "best.json").read_text()) == {
        "checkpoint": best,
        "measure": "reward/mean",
        "value": max(rewards),
    }


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("measure", "seen", "best", "value"),
    [
        # Graded rewards: nothing earns full marks, and yet there is a best checkpoint.
        ("reward/mean", [(0.0, 0.002), (0.0, 0.4), (0.0, 0.9)], "step-000004", 0.9),
        ("accuracy", [(0.1, 0.9), (0.2, 0.1), (0.0, 0.9)], "step-000002", 0.2),
        # Equal: the higher reward decides, and of equals the earlier stays.
        ("accuracy", [(0.0, 0.002), (0.0, 0.4), (0.0, 0.4)], "step-000002", 0.0),
        ("reward/mean", [(0.5, -3.0), (0.5, -1.0), (0.5, -2.0)], "step-000002", -1.0),
    ],
)
def test_the_best_is_what_the_measure_says(measure, seen, best, value, tmp_path, monkeypatch):
    pretend(monkeypatch, *({"accuracy": accuracy, "reward": reward} for accuracy, reward in seen))
    report = run(tmp_path, **{"sft": None, "steps": 4, "evaluation.measure": measure})
    assert (report.measure, report.best_checkpoint, report.eval_best) == (measure, best, value)
    told = json.loads((Path(report.run) / "best.json").read_text())
    assert told == {"checkpoint": best, "measure": measure, "value": value}
    last = metrics_of(report.run)[-1]
    assert report.eval_after == last[last["measure"]]


@pytest.mark.slow
def test_an_improvement_is_saved_also_when_no_checkpoint_is_due(tmp_path, monkeypatch):
    pretend(monkeypatch, 0.1, 0.2, 0.4, 0.3)
    report = run(tmp_path, **{"sft": None, "steps": 5, "checkpoint.every": 100, "checkpoint.keep": 5})
    assert saved(report) == ["step-000000", "step-000002", "step-000004", "step-000005"]


@pytest.mark.slow
def test_sft_checkpoints_make_room_for_those_of_reinforcement(tmp_path):
    report = run(tmp_path, **{"sft.steps": 6, "checkpoint.keep": 3, "steps": 2})
    assert saved(report) == ["sft-000006", "step-000000", "step-000002"]


def test_a_damaged_checkpoint_ahead_never_pushes_out_a_whole_one(tmp_path, monkeypatch):
    """With keep 1 the run falls back to the best and is left at step 3, which must still be there."""
    calls = []
    real = Controller.leave_if_asked

    def leave(self, source=None):
        self._interrupts.asked |= (self.progress.step, len(calls)) in ((4, 0), (3, 1))
        real(self)

    monkeypatch.setattr(Controller, "leave_if_asked", leave)
    pretend(monkeypatch, 0.9, *[0.1] * 8)
    report = run(tmp_path, **{"sft": None, "steps": 6, "checkpoint.keep": 1})
    folder = Path(report.run)
    assert saved(report) == ["step-000000", "step-000004"]
    (folder / "checkpoints" / "step-000004" / "state.json").unlink()
    calls.append("resumed")
    report = resume(folder, quiet=True)
    assert report.status == "interrupted"
    assert saved(report) == ["step-000000", "step-000003", "step-000004"]
    calls.append("again")
    report = resume(folder, quiet=True)
    assert (report.status, saved(report)) == ("finished", ["step-000000", "step-000006"])


@pytest.mark.slow
@pytest.mark.world
def test_a_warning_is_kept_once_however_often_the_run_is_resumed(tmp_path):
    report = run(tmp_path, rewards=[{"kind": "exact", "weight": 2}, {"kind": "format", "pattern": "x"}])
    (warning,) = report.warnings
    (Path(report.run) / "summary.json").unlink()
    assert resume(report.run, quiet=True).warnings == [warning]


@pytest.mark.slow
def test_a_run_warns_by_each_limit_of_what_comes_between_trainer_and_sampler(tmp_path, monkeypatch):
    apart = {"mismatch/k3": 0.5, "mismatch/ess": 0.2}
    monkeypatch.setattr(train_step, "_mismatch", lambda *batch: (apart, 0))
    limits = {"limits.mismatch_k3": 0.4, "limits.ess": 0.3, "limits.correction_clip_fraction": 0.9}
    # Every weight is about 1, and so is cut.
    bounds = {"policy.proximal": "recompute", "policy.correction": {"high": 0.1}}
    report = run(tmp_path, **{"policy.kl.coefficient": 0.1}, **limits, **bounds)
    told = [sentence.partition("; the first batch is in ")[0] for sentence in report.warnings]
    assert sorted(told) == [
        "trainer and sampler have come apart: mismatch/ess has fallen below limits.ess = 0.3",
        "trainer and sampler have come apart: mismatch/k3 has passed limits.mismatch_k3 = 0.4",
        "trainer and sampler have come apart: policy/correction_clip_fraction has passed "
        "limits.correction_clip_fraction = 0.9",
    ]
    kept = sorted(path.name for path in (Path(report.run) / "evidence").glob("*.safetensors"))
    assert kept == ["correction_clip_fraction.safetensors", "ess.safetensors", "mismatch_k3.safetensors"]


@pytest.mark.slow
def test_the_summary_is_the_report(tmp_path):
    report = run(tmp_path)
    assert json.loads((Path(report.run) / "summary.json").read_text()) == asdict(report)
    assert report.versions == versions()
    assert sorted(report.versions) == ["millrace", "python", "torch", "transformers"]
    assert report.device == "cpu (1 threads)"
    assert 5_000 < report.num_parameters < 20_000


@pytest.mark.slow
def test_the_time_of_a_run_goes_on_where_the_last_process_left_it(tmp_path):
    report = run(tmp_path)
    state = Path(report.run) / "checkpoints" / "step-000004" / "state.json"
    told = json.loads(state.read_text())
    assert 0 < told["save_s"] < told["wall_s"] <= report.wall_s + 0.01
    (Path(report.run) / "summary.json").unlink()
    for name in ("step-000004", "step-000002"):
        shutil.rmtree(Path(report.run) / "checkpoints" / name)
    again = resume(report.run, quiet=True)
    first = json.loads((Path(report.run) / "checkpoints" / "step-000000" / "state.json").read_text())
    assert again.wall_s > first["wall_s"]
    assert again.steps == 4
