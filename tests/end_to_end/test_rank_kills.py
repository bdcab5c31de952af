"""Ranks killed at any moment: a clear error soon, and in the end the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.rank_runs import ENVIRONMENT, MILLRACE, command, ranks_below
from tests.end_to_end.runs import check_equal, finished
from tests.end_to_end.tiny import tiny_recipe

NUM_KILLS = 10
MOST_S = 20.0
LIMIT_S = 240.0
TREE = ("mesh.dp_shard=2", "steps=12", "evaluation.every=4")
FIRST_STEP = re.compile(r"^(warm-up|reinforcement): \d+ steps", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_killed_at_random_moments_say_so_soon_and_end_with_the_same_bits(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    runs = tmp_path / "runs"
    launcher, begun_s = training(command(tmp_path, "undisturbed", *TREE), tmp_path)
    assert wait(launcher, LIMIT_S)
    length_s = time.monotonic() - begun_s
    assert launcher.returncode == 0

    # One moment in each of ten equal parts of the training, in random order, and a rank for each.
    rng = random.Random(17)
    moments = [(length_s * (part + rng.random()) / NUM_KILLS, rng.randrange(2)) for part in range(NUM_KILLS)]
    rng.shuffle(moments)
    killed, number = 0, 0
    while moments:
        number += 1
        name = f"killed-{number}"
        arguments = command(tmp_path, name, *TREE)
        while not finished(runs / name):
            delay_s, victim = moments[-1] if moments else (LIMIT_S, 0)
            took_s = kill(arguments, tmp_path, delay_s, victim)
            if took_s is not None and not finished(runs / name):
                assert took_s < MOST_S
                killed += 1
                moments.pop()
                print(
                    f"rank {victim} killed after {delay_s:.1f} s; the run ended {took_s:.1f} s later",
                    flush=True,
                )
            elif moments:
                # It was done before its moment came; the next run gets an earlier one.
                moments[-1] = (0.8 * delay_s, victim)
            arguments = [*MILLRACE, "resume", str(runs / name)]
        check_equal(runs / name, runs / "undisturbed")
    assert killed == NUM_KILLS


def training(arguments: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], float]:
    """A run that has come to its first step, or to its end, and when; what it says is in two files."""
    said = folder / "said.txt"
    with said.open("w") as out, (folder / "told.txt").open("w") as err:
        launcher = subprocess.Popen(arguments, stdout=out, stderr=err, env={**os.environ, **ENVIRONMENT})
    ends_s = time.monotonic() + LIMIT_S
    while launcher.poll() is None and not FIRST_STEP.search(said.read_text()):
        assert time.monotonic() < ends_s, said.read_text()
        time.sleep(0.02)
    return launcher, time.monotonic()


def wait(launcher: subprocess.Popen[bytes], most_s: float) -> bool:
    """Whether a run has ended within some seconds."""
    try:
        launcher.wait(most_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def kill(arguments: list[str], folder: Path, delay_s: float, victim: int) -> float | None:
    """Kill a rank so long after the first step: seconds until the run has said so; None if it ended before.

    Raises:
        AssertionError: the run did not name the rank, or failed by itself.
    """
    launcher, _ = training(arguments, folder)
    if wait(launcher, delay_s):
        assert launcher.returncode == 0, (folder / "told.txt").read_text()
        return None
    process = ranks_below(launcher.pid).get(victim)
    if process is None:
        assert wait(launcher, MOST_S)
        return None
    os.kill(process, signal.SIGKILL)
    killed_s = time.monotonic()
    assert wait(launcher, LIMIT_S)
    took_s = time.monotonic() - killed_s
    if launcher.returncode == 0:
        return None  # it was done before it was hit
    assert launcher.returncode == 1
    told = (folder / "told.txt").read_text()
    assert told.startswith(f"error: rank {victim} of 2 ended with signal SIGKILL\n"), told
    return took_s
