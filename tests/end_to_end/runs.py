"""Runs in processes that can be killed, and what must be equal between two runs that are the same."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from millrace import resume, train
from millrace.config.recipe import load_recipe
from millrace.observability.tables import read_table
from tests.end_to_end.tiny import metrics_of, without_times

LIMIT_S = 60.0
# The server imports these once; every attempt is a fork of it and starts at once.
PRELOADED = [
    "millrace.orchestration.launch",
    "pyarrow.parquet",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.end_to_end.runs",
]
# Warm-up and reinforcement, an evaluation and a checkpoint every second step, a judge in another process.
OVERRIDES: dict[str, Any] = {
    "warmup.steps": 9,
    "warmup.learning_rate": 3e-2,
    "rollout.prompts_per_step": 8,
    "steps": 7,
    "rewards": [{"kind": "exact"}, {"kind": "format", "pattern": "[0-9]", "weight": 0.5}],
    "policy.optimizer_steps_per_batch": 2,
    "policy.kl.coefficient": 0.01,
    "policy.optimizer.schedule": "linear",
    "policy.optimizer.ramp_steps": 3,
}


def attempt(recipe: str, name: str, output: str, more: dict[str, Any]) -> None:
    """What a user does until the run is finished: start it, or take it up again."""
    folder = Path(output) / name
    if folder.is_dir() and not (folder / "recipe.yaml").is_file():
        shutil.rmtree(folder)  # killed before it became a run, as its message says
    if folder.is_dir():
        resume(folder, quiet=True)
    else:
        overrides = {"name": name, "output": output, **OVERRIDES, **more}
        train(load_recipe(recipe, overrides), recipe="tiny", quiet=True)


def start(recipe: Path, folder: Path, **more: Any) -> ForkServerProcess:
    """An attempt in a process of its own, with overrides beyond `OVERRIDES`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=attempt, args=(str(recipe), folder.name, str(folder.parent), more))
    process.start()
    return process


def end(process: ForkServerProcess, after_s: float) -> bool:
    """Whether an attempt came to its end within `after_s` seconds; it is killed if not.

    Raises:
        AssertionError: it failed by itself.
    """
    process.join(after_s)
    killed = process.is_alive()
    if killed:
        process.kill()
        process.join(LIMIT_S)
    code = process.exitcode
    process.close()
    assert killed or code == 0, f"an attempt ended with {code}"
    return not killed


def finished(folder: Path) -> bool:
    """Whether a run says that it is finished."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "finished"


def contents(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that does not depend on the clock or on its name."""
    checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("[ws]*"))
    newest = folder / "checkpoints" / checkpoints[-1]
    summary = json.loads((folder / "summary.json").read_text())
    state = json.loads((newest / "state.json").read_text())
    tables = {
        path.relative_to(folder).as_posix(): read_table(path)
        for part in ("rollouts", "evaluations")
        for path in sorted((folder / part).iterdir())
    }
    return {
        "weights": [path.read_bytes() for path in sorted((newest / "model").glob("*.safetensors"))],
        "optimizers": [path.read_bytes() for path in sorted((newest / "optimizer").rglob("*.safetensors"))],
        "critic": [path.read_bytes() for path in sorted((newest / "critic").glob("*.safetensors"))],
        "metrics": without_times(metrics_of(folder)),
        "prompts": [row["prompt_id"] for name in tables if "rollouts" in name for row in tables[name]],
        "tables": repr(tables),  # as text, because NaN equals nothing
        "checkpoints": checkpoints,
        "best": json.loads((folder / "best.json").read_text()),
        "summary": {key: value for key, value in summary.items() if key not in ("run", "name", "wall_s")},
        "state": {
            key: value for key, value in state.items() if key not in ("wall_s", "save_s", "metrics_bytes")
        },
    }


def check_equal(actual: Path, expected: Path, *, but: tuple[str, ...] = ()) -> None:
    """Fail unless two runs are equal in everything, naming what differs."""
    ours, theirs = contents(actual), contents(expected)
    assert [key for key in theirs if key not in but and ours[key] != theirs[key]] == []
