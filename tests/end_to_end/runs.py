"""Runs in processes that can be killed, and what must be equal between two runs that are the same."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from millrace import resume, train
from millrace.config.recipe import load_recipe
from millrace.observability.tables import read_table
from millrace.run.run import Controller
from tests.crash_points import CrashPoint, effects_of, install, left_behind
from tests.end_to_end.tiny import metrics_of, tiny_recipe, without_times
from tests.forked import fork_engines, process
from tests.rewards.helpers import ends_within

LIMIT_S = 60.0
# A run that takes longer hangs: it takes some seconds, and more where the machine is busy.
HANG_S = 300.0
# Written by the clock, and a record of durations.
IGNORED = ("status.json", ".status.json.aside", "spans.jsonl", "report.html", "report.html.partial")
# Warm-up and reinforcement, an evaluation and a checkpoint every second step, a judge in another process.
OVERRIDES: dict[str, Any] = {
    "sft.steps": 9,
    "sft.learning_rate": 3e-2,
    "rollout.prompts_per_step": 8,
    "steps": 7,
    "rewards": [{"kind": "exact"}, {"kind": "format", "pattern": "[0-9]", "weight": 0.5}],
    "policy.optimizer_steps_per_batch": 2,
    "policy.kl.coefficient": 0.01,
    "policy.optimizer.schedule": "linear",
    "policy.optimizer.warmup_steps": 3,
}


def attempt(
    recipe: str, name: str, output: str, more: dict[str, Any], setup: Callable[[], None] | None = None
) -> None:
    """What a user does until the run is finished: start it, or resume it."""
    fork_engines()
    if setup is not None:
        setup()
    folder = Path(output) / name
    if folder.is_dir() and not (folder / "recipe.yaml").is_file():
        shutil.rmtree(folder)  # killed before it became a run, as its message says
    if folder.is_dir():
        resume(folder, quiet=True)
    else:
        overrides = {"name": name, "output": output, **OVERRIDES, **more}
        train(load_recipe(recipe, overrides), recipe="tiny", quiet=True)


def start(
    recipe: Path, folder: Path, *, setup: Callable[[], None] | None = None, **more: Any
) -> ForkServerProcess:
    """An attempt in a process of its own, which calls `setup` first; with overrides beyond `OVERRIDES`."""
    words = (str(recipe), folder.name, str(folder.parent), more, setup)
    return process(attempt, *words, name="trainer")


def dies(
    recipe: Path,
    folder: Path,
    point: CrashPoint,
    *,
    setup: Callable[[CrashPoint], None] = install,
    **more: Any,
) -> bool:
    """Whether an attempt died at its crash point; if not, it has ended by itself and well."""
    trainer = start(recipe, folder, setup=partial(setup, point), **more)
    trainer.join(HANG_S)
    hangs = trainer.is_alive()
    if hangs:
        trainer.kill()
        trainer.join(LIMIT_S)
    code = trainer.exitcode
    trainer.close()
    assert not hangs, f"an attempt did not end within {HANG_S:g} s"
    assert code in (0, -signal.SIGKILL), f"an attempt ended with {code}"
    return code != 0


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
        for path in sorted((folder / part).rglob("*.parquet"))
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


def interrupt_at(monkeypatch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    """Press Ctrl-C when this step is recorded."""
    record = Controller.record

    def pressing(self, *arguments):
        record(self, *arguments)
        if (arguments[0], self.progress.step) == (stage, step):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Controller, "record", pressing)


def files(folder: Path) -> set[str]:
    """The names of all that a run has left, but for what the clock decides."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return names - set(IGNORED)


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run that was not disturbed, with which runs that die are compared.

    Attributes:
        folder: of the run.
        effects: its durable effects, in order.
        settings: its overrides beyond `OVERRIDES`.
        setup: called first in each process of such runs.
    """

    folder: Path
    effects: list[str]
    settings: dict[str, Any]
    setup: Callable[[CrashPoint], None]

    @classmethod
    def run(
        cls, base: Path, settings: dict[str, Any], setup: Callable[[CrashPoint], None] = install
    ) -> Undisturbed:
        """Run the tiny recipe in a folder and log its effects."""
        tiny_recipe(base)
        made = cls(base / "runs" / "undisturbed", [], settings, setup)
        assert not made.live("undisturbed")
        made.effects.extend(effects_of(base / "undisturbed.log"))
        return made

    def live(self, name: str, before: str | int | None = None) -> bool:
        """Start a run or resume it; whether it died before this effect, or has ended well."""
        base, folder = self.folder.parents[1], self.folder.parent / name
        point = CrashPoint(folder, base / f"{name}.log", before, IGNORED)
        return dies(base / "tiny.yaml", folder, point, setup=self.setup, **self.settings)

    def die(self, place: int, check: Callable[[Path], None], *, again: int) -> None:
        """Have a run die before the effect at a place, resume it to its end, and check it.

        Args:
            place: of the effect.
            check: fails if the run is not what it should be.
            again: where its second process dies too: 0 nowhere, 1 before the same effect, if it comes to it
                once more, 2 before an effect with a number that depends on the place.
        """
        name, effect = f"died-{place}", self.effects[place]
        folder, log = self.folder.parent / name, self.folder.parents[1] / f"{name}.log"
        second = (None, effect, 1 + 7 * place % 60)[again]
        try:
            assert self.live(name, effect), "it did not come to its crash point"
            assert effects_of(log)[-1] == effect
            for before in (second, None) if again else (None,):
                if not finished(folder):
                    self.live(name, before)
            assert finished(folder)
            check(folder)
            assert [left for left in left_behind(log) if not ends_within(left, LIMIT_S)] == []
        except Exception as error:
            error.add_note(f"the run died before: {effect}; its second process before: {second}")
            raise
        shutil.rmtree(folder)
