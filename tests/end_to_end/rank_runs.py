"""Runs on several ranks, as commands: what their tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.end_to_end.tiny import metrics_of, without_times

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
    """A command, until it ends."""
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **ENVIRONMENT, **environment},
    )


def begun(folder: Path, name: str, *more: str, until: str = "checkpoints/step-*") -> subprocess.Popen[str]:
    """A run that has written such a file: by default, that has saved its first checkpoint."""
    process = subprocess.Popen(
        command(folder, name, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    ends_s = time.monotonic() + LIMIT_S
    while not list((folder / "runs" / name).glob(until)):
        if process.poll() is not None or time.monotonic() > ends_s:
            process.kill()
            raise AssertionError(f"the run did not begin: {process.communicate()}")
        time.sleep(0.05)
    return process


def resumed(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run that was taken up again, without the clock."""
    done = run([*MILLRACE, "resume", str(folder / "runs" / name)])
    assert done.returncode == 0, done.stderr
    return numbers(folder / "runs" / name)


def numbers(path: Path) -> list[dict[str, Any]]:
    """The records of a run, without the clock."""
    return without_times(metrics_of(path))


def processes_below(launcher: int) -> list[int]:
    """All that a process has started, and what those have."""
    # A process belongs to the thread that started it.
    tasks = [path.name for path in Path(f"/proc/{launcher}/task").glob("*")]
    children = [int(child) for task in tasks for child in _told(launcher, f"task/{task}/children").split()]
    return [found for child in children for found in (child, *processes_below(child))]


def ranks_below(launcher: int) -> dict[int, int]:
    """The ranks that `millrace train` started on this machine: their processes, by rank."""
    found = {}
    for process in processes_below(launcher):
        variables = _told(process, "environ").split(b"\0")
        rank = next((v.removeprefix(b"RANK=").decode() for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None:
            found.setdefault(int(rank), process)
    return found


def _told(process: int, name: str) -> bytes:
    """What the kernel tells of a process; nothing where it has ended meanwhile."""
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
