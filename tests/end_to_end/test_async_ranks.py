"""Two ranks that train on what the first one's engine draws beside them, at once or ahead of training."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.async_runs import check_run, engines_below, events_of, prompts_of
from tests.end_to_end.rank_runs import LIMIT_S, begun, command, numbers, ranks_below, run
from tests.end_to_end.runs import check_equal
from tests.end_to_end.tiny import TREE, tiny_recipe
from tests.rewards.helpers import ends_within

RANKS = "mesh.dp_shard=2"
STEPS = 12
AHEAD = (RANKS, "rollout.max_staleness=2", f"steps={STEPS}", "evaluation.every=4")
SFT = TREE["sft"]["steps"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tiny recipe, and the run `ahead`, whose engine was killed after its first batch."""
    folder = tmp_path_factory.mktemp("async-ranks")
    tiny_recipe(folder)
    launcher = begun(folder, "ahead", *AHEAD, until="rollouts/step-*")
    ranks = ranks_below(launcher.pid)
    assert list(engines_below(ranks[1])) == []
    (engine,) = engines_below(ranks[0])
    os.kill(engine, signal.SIGKILL)
    _, told = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0, told
    return folder


def test_where_the_engine_is_makes_no_difference_to_ranks_that_wait_for_it(folder: Path) -> None:
    for name, processes in (("here", 0), ("there", 1)):
        done = run(command(folder, name, RANKS, f"engine.num_engines={processes}"))
        assert done.returncode == 0, done.stderr
    here, there = folder / "runs" / "here", folder / "runs" / "there"
    check_equal(there, here)
    assert numbers(there) == numbers(here)


def test_a_run_whose_engine_is_killed_goes_on_within_the_bound(folder: Path) -> None:
    path = folder / "runs" / "ahead"
    greatest = check_run(path, steps=STEPS, bound=2, sft=SFT)
    assert greatest[:3] == [0, 1, 2]
    fates = [event["kind"] for event in events_of(path) if event["kind"] in ("engine_lost", "engine_joined")]
    assert fates == ["engine_joined", "engine_lost", "engine_joined"]


def test_each_rank_tells_what_it_did_by_one_clock(folder: Path) -> None:
    path = folder / "runs" / "ahead"
    done = run(["trace", str(path)])
    assert done.returncode == 0, done.stderr
    found = json.loads((path / "trace.json").read_text())["traceEvents"]
    names = {one["args"]["name"]: one["pid"] for one in found if one["name"] == "process_name"}
    assert list(names)[:3] == ["trainer rank 0", "trainer rank 1", "rewards"]
    ends = [
        [one["ts"] + one["dur"] for one in found if (one["pid"], one["name"]) == (names[rank], "sample")]
        for rank in list(names)[:2]
    ]
    assert len(ends[0]) == len(ends[1]) == STEPS
    # Rank 1 has a batch as soon as the first one has handed it out.
    assert all(-0.1e6 < other - first < 1e6 for first, other in zip(*ends, strict=True))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_and_it_resumes(folder: Path, victim: int) -> None:
    name = f"killed-{victim}"
    launcher = begun(folder, name, *AHEAD, until="checkpoints/step-*[1-9]")
    ranks = ranks_below(launcher.pid)
    (engine,) = engines_below(ranks[0])
    os.kill(ranks[victim], signal.SIGKILL)
    _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert told.startswith(f"error: rank {victim} of 2 ended with signal SIGKILL\n"), told
    assert ends_within(engine, 30)

    recipe = folder / "runs" / name / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace("max_staleness: 2", "max_staleness: 1"), encoding="utf-8")
    done = run(["resume", str(recipe.parent)])
    # The first rank alone reads what was under way, and its error is the run's.
    assert done.returncode == 1
    assert "'staleness': 1" in done.stderr and "rank 1" not in done.stderr, done.stderr

    recipe.write_text(text, encoding="utf-8")
    done = run(["resume", str(recipe.parent)])
    assert done.returncode == 0, done.stderr
    check_run(recipe.parent, steps=STEPS, bound=2, sft=SFT)
    assert prompts_of(recipe.parent) == prompts_of(folder / "runs" / "ahead")
