"""Runs on several ranks, as commands: what their tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import forked
from tests.end_to_end.tiny import metrics_of, without_times
from tests.family import below, name_of
from tests.rewards.helpers import comes

# A critic, a reference and several optimizer steps: everything that has weights.
OVERRIDES = [
    "advantage.kind=gae",
    "critic={}",
    "policy.kl.coefficient=0.01",
    "policy.optimizer_steps_per_batch=2",
    "policy.tokens_per_micro_batch=64",
    "deterministic=true",
]
LIMIT_S = 480  # a minute on a quiet machine


def command(folder: Path, name: str, *more: str) -> list[str]:
    """What trains the tiny recipe of a folder in a run of that folder."""
    where = [f"output={folder / 'runs'}", f"name={name}"]
    return ["train", str(folder / "tiny.yaml"), *where, *OVERRIDES, *more]


def run(words: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of millrace, until it ends."""
    return forked.run(words, LIMIT_S, **variables)


def begun(folder: Path, name: str, *more: str, until: str = "checkpoints/step-*") -> forked.Forked:
    """A run that has written such a file: by default, that has saved its first checkpoint."""
    launcher, path = forked.command(command(folder, name, *more)), folder / "runs" / name
    comes(lambda: any(path.glob(until)) or launcher.poll() is not None, LIMIT_S)
    if not any(path.glob(until)):
        launcher.kill()
        raise AssertionError(f"the run did not begin: {launcher.communicate()}")
    return launcher


def resumed(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run that was taken up again, without the clock."""
    done = run(["resume", str(folder / "runs" / name)])
    assert done.returncode == 0, done.stderr
    return numbers(folder / "runs" / name)


def numbers(path: Path) -> list[dict[str, Any]]:
    """The records of a run, without the clock."""
    return without_times(metrics_of(path))


def ranks_below(launcher: int) -> dict[int, int]:
    """The ranks that `millrace train` started on this machine: their processes, by rank."""
    names = {pid: name_of(pid) for pid in below(launcher)}
    return {int(name[len("rank") :]): pid for pid, name in names.items() if name.startswith("rank")}
