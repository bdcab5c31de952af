"""`millrace replay` says what is the same, and what a branch came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from millrace.launchers import local_ranks


@pytest.mark.slow
def test_a_replay_says_what_it_proved_and_leaves_the_run_alone(lab):
    lab.train()
    before = {path: path.read_bytes() for path in Path("runs/tiny-1").rglob("*") if path.is_file()}
    result = lab("replay", "runs/tiny-1", "--quiet")
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "replayed 2 batches in runs/tiny-1-replay-1: every decision, 4 records, all samples and the weights "
        "of step-000000, step-000002 are the same bit for bit\n"
    )
    assert before == {path: path.read_bytes() for path in Path("runs/tiny-1").rglob("*") if path.is_file()}


def test_a_branch_goes_on_with_what_is_set(lab):
    lab.train()
    words = ["--from-step", "1", "--set", "steps=3", "--set", "policy.optimizer.learning_rate=0.5"]
    result = lab("replay", "runs/tiny-1", "--name", "other", *words, "--quiet")
    assert (result.code, result.err) == (0, "")
    first, *rest = result.out.splitlines()
    assert first.startswith("replayed 1 batches in runs/other: ")
    assert len(rest) == 3 and " after batch 3 at " in rest[0]
    told = json.loads(Path("runs/other/branch.json").read_text())
    assert told["settings"] == {"steps": 3, "policy.optimizer.learning_rate": 0.5}
    assert "learning_rate: 0.5" in Path("runs/other/recipe.yaml").read_text()


def test_ranks_of_a_run_are_repeated_by_processes_of_this_machine_whoever_started_them(lab):
    lab.train()
    with Path("runs/tiny-1/recipe.yaml").open("a") as recipe:
        recipe.write("mesh: {dp_replicate: 3, launcher: ray}\n")
    started = []

    def run_ranks(command, num_ranks, *, environment):
        started.append((command[1:], num_ranks))
        return 7

    lab.patch.setattr(local_ranks, "run_ranks", run_ranks)
    assert lab("replay", "runs/tiny-1", "--quiet").code == 7
    assert started == [(["-m", "millrace.cli.main", "replay", "runs/tiny-1", "--quiet"], 3)]
    # What can be said before is said once.
    result = lab("replay", "runs/tiny-1", "--from-step=2")
    assert (result.code, len(started), result.err.count("\n")) == (2, 1, 1)


@pytest.mark.slow
def test_a_rank_beside_the_first_says_nothing_of_what_was_proved(lab):
    lab.train()
    # The package holds the command under its module's name.
    lab.patch.setattr(sys.modules["millrace.cli.replay"], "speaks", lambda: False)
    result = lab("replay", "runs/tiny-1", "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")
    assert Path("runs/tiny-1-replay-1/summary.json").is_file()
