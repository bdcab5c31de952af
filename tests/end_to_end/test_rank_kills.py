"""Ranks that die at a crash point: the launcher names the one that did, and a resume gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_points import CrashPoint, effects_of, environment_of_ranks, log_of_rank
from tests.end_to_end.rank_runs import command, run
from tests.end_to_end.runs import IGNORED, check_equal, files
from tests.end_to_end.tiny import tiny_recipe

NUM_RANKS = 2
SETTINGS = ("mesh.dp_shard=2", "sft.steps=2", "steps=3", "checkpoint.keep=1")
SPANS = "spans-rank-1.jsonl"
# Which rank dies before which effect, in the order in which a run that is resumed each time comes to them.
DEATHS = [
    (1, "optimizer step (2)"),
    (0, "rename checkpoints/.aside-sft-000002 to checkpoints/sft-000002"),
    (1, "write checkpoints/.aside-step-000000/model/model-00002-of-00002.safetensors"),
    (1, "all_gather (20)"),
    (1, "write checkpoints/.aside-step-000002/optimizer/critic/rank-00001.safetensors"),
    (0, "append events.log (4)"),
    (0, "rename .summary.json.aside to summary.json"),
]


@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_a_rank_that_dies_is_named_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    runs, site = tmp_path / "runs", tmp_path / "site"
    log = tmp_path / "undisturbed.log"
    point = CrashPoint(runs / "undisturbed", log, ignoring=(*IGNORED, SPANS), steps=True)
    done = run(command(tmp_path, "undisturbed", *SETTINGS), **environment_of_ranks(site, point))
    assert done.returncode == 0, done.stderr
    for rank in range(NUM_RANKS):
        expected = {effect for victim, effect in DEATHS if victim == rank}
        assert expected <= set(effects_of(log_of_rank(log, rank)))

    arguments = command(tmp_path, "killed", *SETTINGS)
    for number, (victim, effect) in enumerate(DEATHS):
        point = CrashPoint(runs / "killed", tmp_path / f"{number}.log", effect, (*IGNORED, SPANS), steps=True)
        done = run(arguments, **environment_of_ranks(site, point, victim))
        assert effects_of(log_of_rank(point.log, victim))[-1] == effect, done.stderr
        assert done.returncode == 1
        said = f"error: rank {victim} of {NUM_RANKS} ended with signal SIGKILL\n"
        assert done.stderr.startswith(said), f"{effect}: {done.stderr}"
        arguments = ["resume", str(runs / "killed")]
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    check_equal(runs / "killed", runs / "undisturbed")
    assert files(runs / "killed") - {SPANS} == files(runs / "undisturbed") - {SPANS}
