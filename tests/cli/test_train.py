"""What a run says when it is over."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import typer

from millrace.cli.train import result_lines, show_result, start_ranks
from millrace.config.mesh_section import MeshConfig
from millrace.errors import PlanError
from millrace.launchers import local_ranks
from millrace.observability.console import Console
from millrace.run.progress import RunReport


def report(**changes) -> RunReport:
    fields = {
        "run": "runs/quickstart-1",
        "name": "quickstart-1",
        "recipe": "quickstart",
        "status": "finished",
        "measure": "accuracy",
        "eval_before": 0.486,
        "eval_after": 0.9824,
        "eval_best": 0.99,
        "best_checkpoint": "step-000140",
        "steps": 150,
        "sft_steps": 80,
        "wall_s": 192.0,
        "eval_size": 512,
        "warnings": [],
    }
    rest = {name: 0 for name in RunReport.__annotations__ if name not in fields}
    return RunReport(**{**rest, **fields, **changes})


def test_the_result_says_accuracy_time_files_and_what_to_do_next():
    assert result_lines(report()) == [
        "accuracy 0.486 -> 0.982 on 512 held-out prompts, after batch 150 at 3:12",
        "report: runs/quickstart-1/report.html  best checkpoint: step-000140 (accuracy 0.990)",
        'next: millrace evaluate runs/quickstart-1, or: millrace generate runs/quickstart-1 "PROMPT"',
    ]


def test_warnings_are_counted_and_the_last_is_told():
    graded = result_lines(report(measure="reward/format/mean"))
    assert graded[0].startswith("mean format reward 0.486 -> 0.982 on")
    assert result_lines(report(warnings=["one", "two"]))[1] == "warnings: 2, the last: two"


def test_supervised_training_counts_its_own_steps():
    assert "after step 80 of SFT at 3:12" in result_lines(report(steps=0))[0]


def test_an_interrupted_run_leaves_with_130_and_how_to_continue(capsys):
    with pytest.raises(typer.Exit) as left:
        show_result(report(status="interrupted", steps=12, run="runs/my run-1"))
    assert left.value.exit_code == 130
    assert capsys.readouterr().out.splitlines() == [
        "interrupted after batch 12 at 3:12; everything is saved",
        "continue: millrace resume 'runs/my run-1'",
    ]


@pytest.mark.slow
def test_an_interrupted_run_is_continued(lab):
    before = Console.stage

    def stage(self: Console, *words) -> None:
        before(self, *words)
        signal.raise_signal(signal.SIGINT)

    lab.patch.setattr(Console, "stage", stage)
    # Before the first batch is done: what is saved is where it began.
    assert lab.train().out.splitlines()[-2].startswith("interrupted after batch 0 at 0:0")
    assert json.loads(Path("runs/tiny-1/summary.json").read_text())["status"] == "interrupted"
    lab.patch.setattr(Console, "stage", before)
    result = lab("resume", "runs/tiny-1")
    assert "resumed from runs/tiny-1/checkpoints/step-000000" in result.out.splitlines()
    assert (result.code, result.err) == (0, "")


def test_a_run_out_of_time_says_so(capsys):
    with pytest.raises(typer.Exit) as left:
        show_result(report(status="interrupted", out_of_time=True, steps=12))
    assert left.value.exit_code == 130
    assert capsys.readouterr().out.splitlines() == [
        "out of time (timeouts.walltime_s) after batch 12 at 3:12; everything is saved",
        "continue: millrace resume runs/quickstart-1",
    ]


@pytest.mark.slow
def test_a_run_of_limited_time_leaves_saved_and_comes_to_its_end_when_resumed(lab):
    """Within no time each process does one step; the last one is the end."""
    told = [lab.train("timeouts.walltime_s=0.001")]
    told += [lab("resume", "runs/tiny-1") for _ in range(2)]
    assert [result.code for result in told] == [130, 130, 0]
    said = "timeouts.walltime_s is nearly over; saving, then leaving"
    assert [said in result.out.splitlines() for result in told] == [True, True, False]
    for batch, result in enumerate(told[:2]):
        last = result.out.splitlines()[-2]
        assert last.startswith(f"out of time (timeouts.walltime_s) after batch {batch} at "), last
    summary = json.loads(Path("runs/tiny-1/summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["out_of_time"]) == ("finished", 2, False)


def test_a_layout_that_cannot_be_is_refused_before_a_process_is_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(local_ranks, "run_ranks", lambda *given, **more: pytest.fail("ranks were started"))
    with pytest.raises(PlanError, match="^mesh.ep is 2, which does not divide mesh.dp_shard 3"):
        start_ranks(MeshConfig(dp_shard=3, ep=2))


@pytest.mark.slow
def test_a_run_is_named_by_its_recipe_and_quiet_shows_the_result_alone(lab):
    result = lab.train("--quiet")
    assert result.code == 0
    assert len(result.out.splitlines()) == 3
    summary = json.loads(Path("runs/tiny-1/summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["recipe"]) == ("finished", 2, "tiny")
    assert Path("runs/tiny-1/checkpoints", summary["best_checkpoint"], "model", "config.json").is_file()


@pytest.mark.slow
def test_the_run_is_shown_while_it_goes(lab):
    lines = lab.train("steps=1").out.splitlines()
    assert lines[0] == "tiny-1"
    assert "reinforcement: 1 steps" in lines
    assert lines[-1].startswith("next: millrace evaluate runs/tiny-1")
