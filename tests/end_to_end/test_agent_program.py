"""A client of OpenAI's API trained through the proxy, and the same game as an environment: the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.config.recipe import load_recipe
from millrace.observability.tables import read_table
from millrace.replay.replay import replay
from millrace.run.loop import train
from tests.end_to_end.runs import check_equal

pytestmark = pytest.mark.world

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_program"
SMALL: dict[str, Any] = {
    "steps": 2,
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 3,
    "data.eval_size": 1,
    "evaluation.every": 2,
    "checkpoint.every": 2,
    "loggers": [],
}


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
    check_equal(program, game_run)
    rows = [row for path in sorted((program / "rollouts").iterdir()) for row in read_table(path)]
    assert {row["end"] for row in rows} == {"done"}
    assert max(row["num_turns"] for row in rows) == 2
    # The recorded replies are enough to train again.
    assert replay(program, quiet=True).weights[-1] == "step-000002"
