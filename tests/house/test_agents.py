"""`make agents`: its table, its exit code, and what it reads of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import pytest

from millrace.eventlog.log import EventLog
from millrace.rollout.staleness import StalenessPolicy
from tests.house.scripts import load_script
from tests.house.source import ROOT

agents = load_script("agents")


def main(monkeypatch, tmp_path, *words: str, **scenarios) -> int:
    """The exit code, with scenarios in the place of the real ones."""
    monkeypatch.setattr(agents, "OF_RECIPES", scenarios)
    monkeypatch.setattr(agents, "OTHERS", {"schedules": lambda given: f"{given.schedules} schedules"})
    return agents.main(["--output", str(tmp_path), *words])


def test_all_passed_is_success(monkeypatch, tmp_path, capsys):
    assert main(monkeypatch, tmp_path, "--schedules", "3", plain=lambda trial: "well") == 0
    table = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    rows = [re.split(" {2,}", line) for line in table]
    assert rows[0] == ["scenario", "recipe", "seconds", "result"]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("plain", "well"),
        ("plain", "well"),
        ("schedules", "3 schedules"),
    ]


def test_one_that_failed_is_failure_and_the_others_run(monkeypatch, tmp_path, capsys):
    def broken(trial):
        raise agents.Failed(f"train {trial.recipe}\nbroke at once\n")

    words = ["--recipes", "guess", "--only", "kills", "plain"]
    assert main(monkeypatch, tmp_path, *words, kills=broken, plain=lambda trial: "well") == 1
    out = capsys.readouterr().out
    assert "FAILED: broke at once\n" in out and "well" in out and "schedules" not in out
    assert out.endswith("kills guess: train guess\nbroke at once\n\n")


def test_an_accuracy_below_that_of_plain_fails(tmp_path):
    for name, accuracy in (("plain", 0.9), ("near", 0.86), ("far", 0.84)):
        run = tmp_path / name
        log = EventLog(run / "events.log", lambda: 0.0)
        log.add("begin", rules=asdict(StalenessPolicy(groups_per_step=1, staleness=0)), num_batches=0)
        log.close()
        summary = {"status": "finished", "eval_before": 0.1, "eval_after": accuracy}
        (run / "summary.json").write_text(json.dumps(summary))
    trial = agents.Trial("guess", tmp_path, [], 0.05, agents.parsed([]))
    assert trial.accuracy("near") == "accuracy 0.100 -> 0.860"
    with pytest.raises(agents.Failed, match=r"^accuracy 0\.100 -> 0\.840, below 0\.850$"):
        trial.accuracy("far")


def test_tokens_of_attempts_that_failed_are_lost(tmp_path):
    log = EventLog(tmp_path / "events.log", lambda: 0.0)
    failed = partial(log.add, "episode_failed", number=0, sample=1, reason="down")
    failed(attempt=0, again=True, tokens=4)
    failed(attempt=1, again=False, tokens=6)
    log.close()
    # The batches have the 6 tokens of the sample that is left out, and not the 4 before.
    records = [{"stage": "sft"}, {"tokens/sampled": 60}, {"tokens/sampled": 36}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert agents.lost_fraction(tmp_path) == (0.1, 2)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(1800)
def test_a_run_with_environment_workers_outlives_deaths():
    words = ["--quick", "--recipes", "guess", "--only", "kills"]
    script = [sys.executable, str(ROOT / "scripts" / "agents.py"), *words]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\nkills +guess +\d+  3 deaths, accuracy ", done.stdout), done.stdout
