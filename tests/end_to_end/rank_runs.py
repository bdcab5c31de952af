"""Runs on several ranks, as commands: what their tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import forked
from tests.end_to_end.tiny import metrics_of, without_times
from tests.family import below, name_of

MILLRACE = [sys.executable, "-m", "millrace.cli.main"]
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
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def command(folder: Path, name: str, *more: str) -> list[str]:
    """What trains the tiny recipe of a folder in a run of that folder."""
    where = [f"output={folder / 'runs'}", f"name={name}"]
    return [*MILLRACE, "train", str(folder / "tiny.yaml"), *where, *OVERRIDES, *more]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A command, until it ends; one of millrace starts at once, as its ranks and engines do."""
    variables = {**os.environ, **ENVIRONMENT, **environment}
    if arguments[: len(MILLRACE)] == MILLRACE:
        started = forked.command(arguments[len(MILLRACE) :], variables)
        try:
            said, told = started.communicate(LIMIT_S)
            return subprocess.CompletedProcess(arguments, started.wait(), said, told)
        finally:
            started.kill()
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=variables
    )


def begun(folder: Path, name: str, *more: str, until: str = "checkpoints/step-*") -> forked.Forked:
    """A run that has written such a file: by default, that has saved its first checkpoint."""
    words = command(folder, name, *more)[len(MILLRACE) :]
    launcher = forked.command(words, {**os.environ, **ENVIRONMENT})
    ends_s = time.monotonic() + LIMIT_S
    while not list((folder / "runs" / name).glob(until)):
        if launcher.poll() is not None or time.monotonic() > ends_s:
            launcher.kill()
            raise AssertionError(f"the run did not begin: {launcher.communicate(LIMIT_S)}")
        time.sleep(0.05)
    return launcher


def resumed(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run that was taken up again, without the clock."""
    done = run([*MILLRACE, "resume", str(folder / "runs" / name)])
    assert done.returncode == 0, done.stderr
    return numbers(folder / "runs" / name)


def numbers(path: Path) -> list[dict[str, Any]]:
    """The records of a run, without the clock."""
    return without_times(metrics_of(path))


def ranks_below(launcher: int) -> dict[int, int]:
    """The ranks that `millrace train` started on this machine: their processes, by rank."""
    names = {pid: name_of(pid) for pid in below(launcher)}
    return {int(name[len("rank") :]): pid for pid, name in names.items() if name.startswith("rank")}
