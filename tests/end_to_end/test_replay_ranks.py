"""Runs of two ranks, also on Ray, repeated bit for bit on as many ranks of this machine; and branches."""

from __future__ import annotations

import json
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from millrace.eventlog.log import check_log
from millrace.observability.tables import read_table, write_table
from millrace.replay.compare import check_weights
from millrace.replay.recorded_log import ReplayError
from millrace.run.folder import RunFolder
from tests.end_to_end.async_runs import events_of
from tests.end_to_end.rank_runs import LIMIT_S, begun, command, numbers, ranks_below, run
from tests.end_to_end.runs import check_equal
from tests.end_to_end.tiny import metrics_of, tiny_recipe

# Answers so long that weights arrive while they are drawn; their bits depend on what is drawn beside them.
AHEAD = (
    "mesh.dp_shard=2",
    "rollout.max_staleness=2",
    "engine.num_engines=2",
    "steps=6",
    "rollout.max_tokens=30",
    "deterministic=false",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tiny recipe, and the run `ahead`."""
    folder = tmp_path_factory.mktemp("replay-ranks")
    tiny_recipe(folder)
    done = run(command(folder, "ahead", *AHEAD))
    assert done.returncode == 0, done.stderr
    return folder


def replayed(folder: Path, name: str, *more: str) -> tuple[int, str, str]:
    """Replay a run: exit code, what was said, and which errors were told."""
    done = run(["replay", str(folder / "runs" / name), "--quiet", *more])
    return done.returncode, done.stdout, done.stderr


def check_repeats(folder: Path, name: str) -> Path:
    """Replay a run; fail unless all that it leaves behind is the same. Gives the repetition's folder."""
    code, said, told = replayed(folder, name)
    assert (code, told) == (0, "")
    path, again = folder / "runs" / name, folder / "runs" / f"{name}-replay-1"
    assert said.count("\n") == 1 and said.startswith(f"replayed 6 batches in {again}: every decision, ")
    assert f" {len(metrics_of(path))} records, " in said
    assert timeless(again) == timeless(path)
    assert check_log(events_of(again)) == []
    check_equal(again, path, but=("summary",))
    return again


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{**event, "time_s": 0} for event in events_of(path)]


def test_two_ranks_ahead_of_training_are_repeated_with_the_shares_that_each_saved(folder: Path) -> None:
    path = folder / "runs" / "ahead"
    assert max(record.get("staleness/max", 0) for record in metrics_of(path)) == 2
    again = check_repeats(folder, "ahead")
    shares = sorted(share.name for share in again.glob("checkpoints/step-000006/model/*.safetensors"))
    assert shares == [f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    both = RunFolder(path), RunFolder(again)
    assert list(check_weights(*both))[-1] == "step-000006"
    (optimizer,) = again.glob("checkpoints/step-000006/optimizer/critic/*1.safetensors")
    data = bytearray(optimizer.read_bytes())
    data[-1] ^= 1
    optimizer.write_bytes(data)
    with pytest.raises(
        ReplayError, match=f"step-000006 is damaged: optimizer/critic/{optimizer.name} is not"
    ):
        check_weights(*both[::-1])


def test_a_run_that_lost_a_rank_and_was_taken_up_is_repeated(folder: Path) -> None:
    launcher = begun(folder, "killed", *AHEAD, until="checkpoints/step-000002")
    os.kill(ranks_below(launcher.pid)[1], signal.SIGKILL)
    _, told = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 1 and "signal SIGKILL" in told, told
    done = run(["resume", str(folder / "runs" / "killed")])
    assert done.returncode == 0, done.stderr
    kinds = [event["kind"] for event in events_of(folder / "runs" / "killed")]
    assert (kinds.count("resume"), kinds.count("threads")) == (1, 2)
    check_repeats(folder, "killed")


def test_a_sample_that_is_not_the_runs_ends_every_rank_with_one_sentence(folder: Path) -> None:
    path = folder / "runs" / "changed"
    shutil.copytree(folder / "runs" / "ahead", path)
    table = path / "rollouts" / "step-000001.parquet"
    rows = read_table(table)
    rows[3]["reward"] = 7.5
    table.unlink()
    write_table(table, rows)
    code, said, told = replayed(folder, "changed")
    assert (code, said) == (1, "")
    about = "rollouts/step-000001.parquet, row 3: reward was 7.5 in the run and is 0.0 in the replay"
    assert told == f"error: run {path}: {about}\n"


def test_a_branch_of_two_ranks_goes_on_with_what_is_set(folder: Path) -> None:
    words = ["--from-step=4", "--set=policy.optimizer.learning_rate=0.05", "--set=steps=7", "--name=branch"]
    code, said, told = replayed(folder, "ahead", *words)
    assert (code, told) == (0, "")
    assert (
        said.startswith(f"replayed 4 batches in {folder / 'runs' / 'branch'}: ") and " after batch 7 " in said
    )
    ours, theirs = (
        [record for record in numbers(folder / "runs" / name) if record["stage"] == "reinforcement"]
        for name in ("branch", "ahead")
    )
    assert ours[:4] == theirs[:4] and len(ours) == 7
    assert min(record["policy/learning_rate"] for record in ours[4:]) > 0.01


@pytest.mark.parametrize("processes", [0, 1])
def test_two_ranks_that_wait_for_their_samples_are_repeated(folder: Path, processes: int) -> None:
    waits = ("mesh.dp_shard=2", f"engine.num_engines={processes}", "steps=6")
    done = run(command(folder, f"waits-{processes}", *waits))
    assert done.returncode == 0, done.stderr
    check_repeats(folder, f"waits-{processes}")


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'millrace-rl[ray]'")
def test_a_run_on_ray_is_repeated_by_processes_with_as_many_threads(folder: Path) -> None:
    done = run(command(folder, "ray", *AHEAD, "mesh.launcher=ray", "threads=2", "engine.num_engines=1"))
    assert done.returncode == 0, done.stderr
    again = check_repeats(folder, "ray")
    assert "launcher: ray" in (folder / "runs" / "ray" / "recipe.yaml").read_text()
    assert "launcher: ray" not in (again / "recipe.yaml").read_text()
    (threads,) = [event["ranks"] for event in events_of(again) if event["kind"] == "threads"]
    assert threads == [2, 2]
    assert json.loads((again / "summary.json").read_text())["device"] == "cpu (2 threads)"
