"""A run that is killed at any moment, and taken up again, ends with the very same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import LIMIT_S, check_equal, contents, end, finished, start
from tests.end_to_end.tiny import tiny_recipe


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(num_kills, tmp_path):
    tiny_recipe(tmp_path)
    recipe, runs = tmp_path / "tiny.yaml", tmp_path / "runs"
    undisturbed = runs / "undisturbed"
    for name in ("first", "undisturbed"):  # the first one pays for the server's imports
        begun_s = time.monotonic()
        assert end(start(recipe, runs / name), LIMIT_S)
        duration_s = time.monotonic() - begun_s
    check_equal(runs / "first", undisturbed)
    assert len(set(contents(undisturbed)["prompts"])) > 1

    # One moment in each of `num_kills` equal parts of the run, in random order.
    rng = random.Random(17)
    moments_s = [duration_s * (part + rng.random()) / num_kills for part in range(num_kills)]
    rng.shuffle(moments_s)
    killed, number = 0, 0
    while moments_s:
        number += 1
        killed += kill_until_finished(recipe, runs / f"killed-{number}", moments_s)
        check_equal(runs / f"killed-{number}", undisturbed)
    assert killed == num_kills


def kill_until_finished(recipe: Path, folder: Path, moments_s: list[float]) -> int:
    """Start and take up a run until it is finished, using up moments; how many times it was killed."""
    killed = 0
    while not finished(folder):
        moment_s = moments_s.pop() if moments_s else LIMIT_S
        if not end(start(recipe, folder), moment_s):
            killed += 1
        elif moment_s < LIMIT_S:
            # It was done before its moment came; the next run gets an earlier one.
            moments_s.insert(0, 0.8 * moment_s)
    return killed
