"""The examples run as their own comments say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millrace import load_recipe, train

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_task_of_ones_own_trains_with_its_own_data_and_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLES / "own_task", tmp_path / "own_task")
    monkeypatch.chdir(tmp_path / "own_task")
    subprocess.run([sys.executable, "make_data.py"], check=True, timeout=60)
    report = train(load_recipe("recipe.yaml", {"steps": 2, "sft.steps": 60, "loggers": []}), quiet=True)
    assert (report.status, report.steps, report.num_train_prompts) == ("finished", 2, 500)
    assert report.right_demonstrations == report.scored_demonstrations == 100
    records = map(json.loads, (Path(report.run) / "metrics.jsonl").read_text().splitlines())
    rewards = [record["reward/mean"] for record in records if record["stage"] == "reinforcement"]
    # Letters in their place earn a share of the reward, so it lies between none and all.
    assert all(0.3 < reward < 0.95 for reward in rewards)
