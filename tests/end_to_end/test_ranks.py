"""A run on two ranks learns what a run of one process learns, and ends when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.close import close_fp64
from tests.end_to_end.tiny import metrics_of, tiny_recipe

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


def command(folder: Path, name: str, *more: str) -> list[str]:
    where = [f"output={folder / 'runs'}", f"name={name}"]
    return [*MILLRACE, "train", str(folder / "tiny.yaml"), *where, *OVERRIDES, *more]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run `alone`, and `spread` over two ranks by millrace itself."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_recipe(folder)
    for name, more in (("alone", ()), ("spread", ("mesh.dp_shard=2",))):
        done = run(command(folder, name, *more))
        assert done.returncode == 0, done.stderr
    return folder


def numbers(path: Path) -> list[dict[str, Any]]:
    """The records of a run without the clock."""
    return [
        {key: value for key, value in record.items() if not key.startswith("time/")}
        for record in metrics_of(path)
    ]


def test_two_ranks_learn_what_one_process_learns(folder: Path) -> None:
    alone, spread = numbers(folder / "runs" / "alone"), numbers(folder / "runs" / "spread")
    assert len(alone) == len(spread) > 6
    assert [record["stage"] for record in alone] == [record["stage"] for record in spread]
    # Warm-up, evaluations and the first batch of reinforcement. Where a gradient is nothing but rounding, as
    # most of it is then, Adam makes whole steps of it, and later batches are not the same any more.
    first = next(n for n, record in enumerate(alone) if record["stage"] == "reinforcement")
    for one, other in zip(alone[: first + 1], spread[: first + 1], strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            close_fp64(other[key], value, rtol=1e-4, atol=1e-6) if isinstance(value, float) else None
            assert isinstance(value, float) or other[key] == value
    assert [record.get("version") for record in alone] == [record.get("version") for record in spread]


def test_what_they_save_is_an_ordinary_model(folder: Path) -> None:
    checkpoint = json.loads((folder / "runs" / "spread" / "best.json").read_text())["checkpoint"]
    saved = folder / "runs" / "spread" / "checkpoints" / checkpoint
    ours, theirs = (
        {path.name: path.stat().st_size for path in (where / "model").iterdir()}
        for where in (saved, folder / "runs" / "alone" / "checkpoints" / checkpoint)
    )
    assert ours == theirs
    done = run([*MILLRACE, "evaluate", str(folder / "runs" / "spread")])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_same_ranks(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    arguments = command(folder, "torchrun", "mesh.dp_shard=2")
    done = run([*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *arguments[1:]])
    assert done.returncode == 0, done.stderr
    assert numbers(folder / "runs" / "torchrun") == numbers(folder / "runs" / "spread")


def test_a_run_whose_rank_is_killed_ends_soon_and_resumes_to_the_same_numbers(folder: Path) -> None:
    path = folder / "runs" / "killed"
    started = subprocess.Popen(
        command(folder, "killed", "mesh.dp_shard=2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ends = time.monotonic() + 120
    while not list(path.glob("checkpoints/step-*")) and time.monotonic() < ends:
        time.sleep(0.05)
    victim = next(pid for pid, rank in ranks_of(started.pid).items() if rank == "1")
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    _, told = started.communicate(timeout=60)
    assert time.monotonic() - killed_s < 20
    assert started.returncode == 1
    assert "rank 1 of 2 ended with signal SIGKILL" in told
    done = run([*MILLRACE, "resume", str(path)])
    assert done.returncode == 0, done.stderr
    assert numbers(path) == numbers(folder / "runs" / "spread")


def ranks_of(launcher: int) -> dict[int, str]:
    """The launcher's ranks: process id and rank."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = next((v.removeprefix(b"RANK=").decode() for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(child)] = rank
    return found


def test_a_mesh_of_another_size_than_the_ranks_is_refused(folder: Path) -> None:
    done = run(command(folder, "wrong", "mesh.dp_shard=2"), RANK="0", WORLD_SIZE="3")
    assert done.returncode == 2
    assert "asks for 2 ranks, and 3 were started" in done.stderr
