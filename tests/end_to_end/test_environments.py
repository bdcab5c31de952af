"""Runs with environments in the trainer's process and in workers: ahead of training, resumed, replayed."""

from __future__ import annotations

import html
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.config.recipe import load_recipe
from millrace.environments.fault_injection import FAULT
from millrace.environments.guess import DIGITS
from millrace.eventlog.log import check_log
from millrace.observability.tables import read_table
from millrace.replay.recorded_log import ReplayError
from millrace.replay.replay import replay
from millrace.run.loop import resume, train
from millrace.run.run import Controller
from tests.end_to_end.async_runs import events_of
from tests.end_to_end.runs import check_equal
from tests.end_to_end.tiny import metrics_of
from tests.house.source import ROOT

SMALL: dict[str, Any] = {
    "threads": 1,
    "steps": 4,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "data.task_size": 60,
    "data.eval_size": 6,
    "evaluation.every": 4,
    "checkpoint.every": 2,
    "loggers": [],
}
CHANCE = {
    "environment": {
        "kind": "function",
        "function": "tests.environments.chance:Chance",
        "max_turns": 4,
        "on_length": "continue",
    },
}


def recipe(folder: Path, name: str, **more: Any):
    return load_recipe("guess", {"output": str(folder / "runs"), "name": name, **SMALL, **more})


def episodes(run: str | Path) -> list[dict[str, Any]]:
    return [row for path in sorted((Path(run) / "rollouts").iterdir()) for row in read_table(path)]


def trained_on(folder: Path, rows: list[dict[str, str]], environment: dict[str, Any], **more: Any):
    """Two batches of the model of `guess` on rows and an environment of one's own."""
    data = folder / "rows.jsonl"
    numbered = [row | {"problem": number} for number, row in enumerate(rows)]
    data.write_text("\n".join(map(json.dumps, numbered)), encoding="utf-8")
    guess = load_recipe("guess", {}).model_dump(exclude_unset=True)
    kept = {name: guess[name] for name in ("tokenizer", "model", "rollout", "engine", "policy")}
    own = {
        "output": str(folder / "runs"),
        "environment": environment,
        "data": {"train": str(data), "identity_column": "problem", "eval_size": 6},
        "steps": 2,
        "checkpoint.every": 2,
    }
    small = {name: value for name, value in SMALL.items() if not name.startswith("data.")}
    return train(load_recipe("grpo", {**kept, **small, **own, **more}), quiet=True)


def test_a_game_in_the_trainers_process_is_trained_resumed_and_replayed(tmp_path, monkeypatch):
    whole = train(recipe(tmp_path, "whole"), quiet=True)
    assert (whole.status, whole.steps) == ("finished", 4)
    rows = episodes(whole.run)
    assert len(rows) == 4 * 16
    assert {row["end"] for row in rows} <= {"done", "max_turns"}
    for row in rows:
        lines = row["transcript"].split("\n")
        assert lines[0] == "< > ?" and len(lines) == 2 * row["num_turns"]
    assert metrics_of(whole.run)[-1]["episode/turns_mean"] <= 4
    # The report shows whole episodes.
    shown = read_table(Path(whole.run) / "evaluations" / "after.parquet")[0]["transcript"].split("\n")
    assert len(shown) > 2
    assert f"\n{html.escape(shown[1])}\n" in (Path(whole.run) / "report.html").read_text(encoding="utf-8")
    assert replay(Path(whole.run), quiet=True).weights[-1] == "step-000004"
    # Left after two batches and resumed, the run has the same bits.
    original = Controller.leave_if_asked

    def leaving(self, *given):
        if self.progress.stage == "reinforcement" and self.progress.step == 2:
            raise KeyboardInterrupt
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "leave_if_asked", leaving)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(tmp_path, "left"), quiet=True)
    resume(tmp_path / "runs" / "left", quiet=True)
    check_equal(tmp_path / "runs" / "left", Path(whole.run), but=("summary", "events"))


def test_failures_on_purpose_are_played_again_and_then_left_out(tmp_path):
    fault = {"environment.fault": 0.5, "limits.failed_rewards": 1.0, "steps": 1, "checkpoint.every": 1}
    report = train(recipe(tmp_path, "fault", **fault), quiet=True)
    assert (report.status, check_log(events_of(Path(report.run)))) == ("finished", [])
    rows = episodes(report.run)
    failed = [row for row in rows if row["end"] == "failed"]
    # Half of the episodes fail, and half of those that are played again.
    assert 0 < len(failed) < len(rows) / 2 and {row["reason"] for row in failed} == {
        f"the environment {FAULT}"
    }
    again = [event["again"] for event in events_of(Path(report.run)) if event["kind"] == "episode_failed"]
    assert again.count(False) == len(failed) and again.count(True) >= len(failed)


@pytest.mark.slow
@pytest.mark.world
def test_random_replies_of_workers_are_replayed_without_running_them(tmp_path):
    """Ahead of training, with engines and environments in processes of their own."""
    ahead = {"rollout.max_staleness": 1, "engine.num_engines": 1}
    report = train(recipe(tmp_path, "ahead", **CHANCE, **ahead), quiet=True)
    assert report.status == "finished"
    assert check_log(events_of(Path(report.run))) == []
    replies = {row["transcript"] for row in episodes(report.run)}
    assert len({text.split("\n")[2] for text in replies}) == 2
    assert replay(Path(report.run), quiet=True).weights[-1] == "step-000004"


@pytest.mark.slow
@pytest.mark.world
def test_a_failed_environment_costs_its_sample_and_nothing_else(tmp_path):
    broken = {"environment": CHANCE["environment"] | {"function": "tests.environments.chance:Broken"}}
    limit = {"limits.failed_rewards": 0.6}
    report = train(recipe(tmp_path, "broken", **broken, **limit, **{"steps": 2}), quiet=True)
    assert report.status == "finished"
    # The workers ended with the run.
    assert "millrace-environments" not in {thread.name for thread in threading.enumerate()}
    rows = episodes(report.run)
    failed = [row for row in rows if row["end"] == "failed"]
    assert len(failed) == len(rows) / 2
    reasons = {row["sample"]: row["reason"] for row in failed}
    assert reasons.keys() == {2, 3}
    assert "begin raised OSError: there is no room" in reasons[2]
    assert "step 2 raised OSError: the tool is down" in reasons[3]
    assert {(row["sample"], row["num_turns"]) for row in failed} == {(2, 0), (3, 2)}
    assert all(row["outcome"] == "failed" for row in failed)
    again = [event["again"] for event in events_of(Path(report.run)) if event["kind"] == "episode_failed"]
    assert again.count(True) == again.count(False) >= len(failed)


SERVER = {"command": ["python", str(ROOT / "tests" / "environments" / "mcp_server.py")], "tools": ["half"]}


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize(
    "given_tools",
    [{"tools": ["tests.environments.tool_samples:half"]}, {"mcp_servers": [{**SERVER, "shared": True}]}],
    ids=["functions", "server"],
)
def test_a_recipe_names_tools_that_the_policy_calls(tmp_path, given_tools):
    """A token that is a digit calls the tool; another one is the answer, which the recipe's reward scores."""
    rows = [{"prompt": "< > ?", "answer": DIGITS[1 + index % 15]} for index in range(60)]
    environment = {
        "kind": "tools",
        **given_tools,
        "tool_format": "pattern",
        "tool_pattern": "(?P<argument>[0-9])",
        "tool": "half",
        "max_turns": 3,
        "on_length": "continue",
    }
    report = trained_on(tmp_path, rows, environment, rewards=[{"kind": "exact"}])
    played = episodes(report.run)
    # Before the first update, when every token is about as likely.
    metrics = next(one for one in metrics_of(report.run) if one["stage"] == "reinforcement")
    assert {row["end"] for row in played} <= {"done", "invalid", "max_turns"}
    assert 0 < metrics["tools/called_fraction"] <= 1 and metrics["tools/calls_mean"] > 0
    for row in played:
        lines = row["transcript"].split("\n")
        if row["num_turns"] > 1 and lines[1] in ("> 1", "> 9"):
            assert lines[2] == {"> 1": "<", "> 9": "<<"}[lines[1]]
    assert replay(Path(report.run), quiet=True).weights[-1] == "step-000002"


@pytest.mark.slow
@pytest.mark.world
def test_an_environment_of_gymnasium_is_trained_in(tmp_path):
    """A token that is one letter is an action; others are none, and end the episode."""
    letters = "_abcdefghijklmnopqrstuvwxyz"
    environment = {
        "kind": "gymnasium",
        "id": "tests.environments.gymnasium_games:Word-v0",
        "options": {"length": 2},
        "max_invalid_actions": 0,
        "max_turns": 5,
        "on_length": "continue",
    }
    report = trained_on(tmp_path, [{"prompt": letters, "answer": ""}] * 60, environment)
    played = episodes(report.run)
    assert {row["end"] for row in played} == {"done", "invalid"}
    for row in played:
        lines = row["transcript"].split("\n")
        assert lines[0] == "__" and set(lines[2::2]) <= {f"{letter}_" for letter in letters}
        is_letter = [len(line) == 3 and line[2] in letters[1:] for line in lines[1::2]]
        assert is_letter == [True] * (len(is_letter) - 1) + [row["end"] == "done"]
    found = replay(Path(report.run), live=True, quiet=True)
    assert found.weights[-1] == "step-000002" and found.num_replies > found.num_episodes > len(played)


@pytest.mark.slow
@pytest.mark.world
def test_an_environment_that_writes_into_the_runs_folder_ends_no_run(tmp_path):
    """What it added stays; what it damaged is named by the command that reads it."""
    run = tmp_path / "runs" / "written"
    options = {"run": str(run), "rubbish": ["metrics.jsonl", "events.log"]}
    environment = CHANCE["environment"] | {
        "function": "tests.environments.chance:Writing",
        "options": options,
    }
    rows = [{"prompt": "< > ?", "answer": DIGITS[1 + index % 15]} for index in range(60)]
    report = trained_on(
        tmp_path, rows, environment, name="written", **{"checkpoint.every": 1, "checkpoint.keep": 1}
    )
    assert (report.status, report.steps) == ("finished", 2)
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"step-000000.txt", "step-000002"}
    assert (run / "notes.bin").is_file() and (run / "report.html").is_file()
    with pytest.raises(ReplayError, match="events.log is damaged"):
        replay(run, quiet=True)


@pytest.mark.world
@pytest.mark.slow
def test_a_class_of_trl_is_trained_on(tmp_path):
    """Tokens with a digit call its tool; its own reward is the score."""
    environment = {
        "kind": "trl",
        "factory": "tests.environments.trl_classes:Halves",
        "tool_format": "pattern",
        "tool_pattern": "(?P<argument>[0-9])",
        "tool": "half",
        "max_turns": 3,
        "on_length": "continue",
    }
    # The tokenizer has the characters of the rows alone.
    rows = [{"prompt": "< > ?", "answer": DIGITS[1 + index % 15]} for index in range(60)]
    report = trained_on(tmp_path, rows, environment, **{"data.prompt_column": "prompt"})
    played = episodes(report.run)
    assert {row["end"] for row in played} == {"done"} and {row["num_turns"] for row in played} >= {1, 2}
    assert replay(Path(report.run), quiet=True).weights[-1] == "step-000002"
