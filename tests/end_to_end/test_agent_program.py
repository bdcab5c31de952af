"""A client of OpenAI's API trained through the proxy, and the same game as an environment: the same run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from millrace import resume
from millrace.config.recipe import load_recipe
from millrace.observability.tables import read_table
from millrace.replay.replay import replay
from millrace.run.loop import train
from tests.end_to_end.runs import check_equal, contents, interrupt_at
from tests.end_to_end.tiny import metrics_of

pytestmark = pytest.mark.world

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_program"
NAMES = ("branches", "roots", "refused")
SMALL: dict[str, Any] = {
    "steps": 2,
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 3,
    "data.eval_size": 1,
    "evaluation.every": 2,
    "checkpoint.every": 2,
    "loggers": [],
}


@pytest.mark.slow
def test_a_client_script_and_an_environment_give_the_same_tokens_masks_and_advantages(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    game = {
        "kind": "guess",
        "options": {"highest": 3, "guesses": 2},
        "max_turns": 2,
        "on_length": "continue",
    }
    runs = []
    for name, more in (("program", {}), ("game", {"environment": game})):
        settings = {"output": str(tmp_path), "name": name, **SMALL, **more}
        report = train(load_recipe("recipe.yaml", settings), quiet=True)
        assert report.status == "finished"
        runs.append(Path(report.run))
    program, game_run = runs
    check_equal(program, game_run, but=("metrics",))
    ours, theirs = contents(program)["metrics"], contents(game_run)["metrics"]
    # A program names what each of its requests continues, and the game has one conversation.
    branches = [[one.pop(f"agents/{name}_mean", None) for name in NAMES] for one in ours]
    assert {tuple(each) for each in branches} == {(1, 1, 0)}
    assert ours == theirs
    rows = [row for path in sorted((program / "rollouts").iterdir()) for row in read_table(path)]
    assert {row["end"] for row in rows} == {"done"}
    assert max(row["num_turns"] for row in rows) == 2
    # The recorded replies are enough to train again.
    assert replay(program, quiet=True).weights[-1] == "step-000002"


@pytest.mark.slow
@pytest.mark.skipif(
    "VERIFIERS_PYTHON" not in os.environ, reason="set VERIFIERS_PYTHON to a Python with verifiers"
)
def test_an_environment_a_taskset_of_verifiers_and_a_client_give_the_same_run(tmp_path, monkeypatch):
    recipe = (EXAMPLE / "recipe.yaml").read_text(encoding="utf-8")
    agent = str(EXAMPLE / "agent.py")
    lines = (EXAMPLE / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    monkeypatch.chdir(Path(__file__).parents[1] / "environments")
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["task"] = {"idx": row["problem"], "prompt": row["prompt"], "answer": row["answer"]}
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    shared = {"max_turns": 2, "on_length": "continue"}
    client = {"kind": "program", "command": ["python", agent], "sandbox": "none", "task_columns": ["answer"]}
    taskset = {"kind": "verifiers", "id": "verifiers_guess", "python": os.environ["VERIFIERS_PYTHON"]}
    taskset |= {"sandbox": "none", "begin_s": 300.0}
    taskset["options"] = {"agent": {"runtime": {"type": "subprocess"}}}
    game = {"kind": "guess", "options": {"highest": 3, "guesses": 2}}
    runs = []
    for environment in (client, taskset, game):
        settings = {**SMALL, "seed": 5, "output": str(tmp_path), "name": environment["kind"]}
        settings |= {"data.train": str(tmp_path / "rows.jsonl"), "environment": {**environment, **shared}}
        report = train(load_recipe(str(tmp_path / "recipe.yaml"), settings), quiet=True)
        assert report.status == "finished"
        runs.append(Path(report.run))
    for run in runs[1:]:
        check_equal(runs[0], run, but=("metrics",))
    metrics = [contents(run)["metrics"] for run in runs]
    for one in (one for each in metrics for one in each):
        for name in NAMES:
            one.pop(f"agents/{name}_mean", None)
    assert metrics[0] == metrics[1] == metrics[2]
    rows = [row for path in sorted((runs[1] / "rollouts").iterdir()) for row in read_table(path)]
    assert {row["end"] for row in rows} == {"done"} and len({row["reward"] for row in rows}) > 1


@pytest.mark.slow
def test_episodes_with_branches_train_resume_and_replay_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    program = str(Path(__file__).with_name("branching_agent.py"))
    settings = {**SMALL, "output": str(tmp_path), "environment.command": ["python", program]}
    settings |= {"environment.max_turns": 6, "checkpoint.every": 1}
    whole = train(load_recipe("recipe.yaml", settings | {"name": "whole"}), quiet=True)
    with monkeypatch.context() as patch:
        interrupt_at(patch, "reinforcement", 1)
        left = train(load_recipe("recipe.yaml", settings | {"name": "left"}), quiet=True)
    assert (whole.status, left.status) == ("finished", "interrupted")
    assert resume(left.run, quiet=True).status == "finished"
    check_equal(Path(left.run), Path(whole.run))
    found = replay(whole.run, live=True, quiet=True)
    assert found.weights[-1] == "step-000002" and found.num_replies > found.num_episodes > 0
    records = [one for one in metrics_of(whole.run) if "agents/branches_mean" in one]
    # Two conversations share a turn, and the texts are one more root.
    assert {(one["agents/branches_mean"], one["agents/roots_mean"]) for one in records} == {(3.0, 2.0)}
    rows = [row for path in sorted((Path(whole.run) / "rollouts").iterdir()) for row in read_table(path)]
    assert {(row["end"], row["num_turns"]) for row in rows} == {("done", 6)}
    lines = rows[0]["transcript"].splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[after completion 1]",
        "[anew]",
        "[after completion 2]",
    ]
