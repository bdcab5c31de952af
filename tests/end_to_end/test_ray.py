"""Ranks that Ray starts learn the very same, end when one of them dies, and save when asked to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from millrace.eventlog.log import check_log
from millrace.rollout.backend import DRAINED
from millrace.run.scaling import engines_of, request_engines
from millrace.run.status import read_status
from tests.end_to_end.async_runs import check_run, events_of
from tests.end_to_end.rank_runs import LIMIT_S, begun, command, numbers, resumed, run
from tests.end_to_end.tiny import TREE, metrics_of, tiny_recipe
from tests.family import below, proc_file
from tests.house.source import ROOT
from tests.rewards.helpers import comes, ends_within

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'millrace-rl[ray]'"),
    pytest.mark.timeout(600),
]
RANKS = "mesh.dp_shard=2"
RAY = (RANKS, "mesh.launcher=ray")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run `processes`, on two ranks that millrace itself started."""
    folder = tmp_path_factory.mktemp("ray")
    tiny_recipe(folder)
    done = run(command(folder, "processes", RANKS))
    assert done.returncode == 0, done.stderr
    return folder


def test_ray_starts_the_same_ranks_in_turns_with_their_engines(folder: Path) -> None:
    done = run(command(folder, "ray", *RAY, "engine.colocated=true"))
    assert done.returncode == 0, done.stderr
    # Ray carries what the first rank says; the result is told by the command itself.
    assert "(rank 0 pid=" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next: millrace evaluate ")
    assert numbers(folder / "runs" / "ray") == numbers(folder / "runs" / "processes")


def actors_below(launcher: int, kind: str = "Rank") -> list[int]:
    """The processes of the ranks at work, or of the engines."""
    return [
        process for process in below(launcher) if proc_file(process, "cmdline").startswith(f"ray::{kind}.")
    ]


def test_an_engine_that_is_killed_is_replaced_while_the_run_goes_on(folder: Path) -> None:
    ahead = (*RAY, "rollout.max_staleness=2", "engine.num_engines=2", "steps=16", "evaluation.every=100")
    # Steps so small that few weights change at all.
    changed = ("engine.delta_updates=true", "policy.optimizer.learning_rate=1e-9")
    launcher = begun(folder, "engines", *ahead, *changed, until="rollouts/step-*")
    victim, other = actors_below(launcher.pid, "EngineActor")
    os.kill(victim, signal.SIGKILL)
    _, told = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0, told
    path = folder / "runs" / "engines"
    check_run(path, steps=16, bound=2, sft=TREE["sft"]["steps"])
    events = events_of(path)
    (lost,) = [event for event in events if event["kind"] == "engine_lost"]
    assert lost["reason"].startswith("its actor ended; ")
    joined = [event["engine"] for event in events if event["kind"] == "engine_joined"]
    assert joined[:2] == ["engine-0", "engine-1"] and joined[2:] in ([], ["engine-2"])
    shares = [
        record["weight_sync/payload_fraction"]
        for record in metrics_of(path)
        if record["stage"] == "reinforcement"
    ]
    assert len(shares) == 16 and 0 < max(shares) < 0.6
    assert ends_within(other, 30)


def test_engines_are_added_and_retired_and_for_more_than_there_is_room_the_run_goes_on(folder: Path) -> None:
    ahead = (
        *RAY,
        "rollout.max_staleness=2",
        "engine.num_engines=2",
        "steps=100000",
        "evaluation.every=100000",
    )
    launcher = begun(folder, "changed", *ahead, until="rollouts/step-*")
    path, said = folder / "runs" / "changed", []
    for number, there in ((1, 1), (2, 2), (1000, 2), (1, 1)):
        assert comes(lambda: read_status(path).engines is not None, LIMIT_S)
        assert request_engines(path, number, said.append).last_request
        refused = number == 1000
        assert comes(partial(settled, path, there, refused=refused), LIMIT_S), engines_of(path)
        # It goes on.
        begun_at = read_status(path).step
        assert comes(partial(is_past, path, begun_at), LIMIT_S), read_status(path)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 130
    events = events_of(path)
    check_log(events)
    wants = [(event["engines"], event["reason"][:16]) for event in events if event["kind"] == "scale"]
    refused = [number for number, reason in wants if reason == "one engine more "]
    assert refused and refused[0] < 1000
    left = [event["reason"] for event in events if event["kind"] == "engine_lost"]
    assert len(left) >= 2 and set(left) == {DRAINED}
    warnings = json.loads((path / "summary.json").read_text())["warnings"]
    assert [text for text in warnings if "one engine more needs 1 CPU" in text]


def settled(path: Path, number: int, *, refused: bool) -> bool:
    """Whether so many engines are there, or as many as there was room for, and none leaves or starts."""
    found = engines_of(path)
    enough = len(found.activity) >= number if refused else len(found.activity) == number
    return enough and bool(found.reason) == refused and len(found.activity) == found.target


def is_past(path: Path, step: int) -> bool:
    """Whether the run has gone on since that step."""
    return read_status(path).step > step


def test_a_rank_that_is_killed_ends_the_run_soon_and_it_resumes_to_the_same_numbers(folder: Path) -> None:
    launcher = begun(folder, "killed", *RAY)
    victim = actors_below(launcher.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    _, told = launcher.communicate(timeout=LIMIT_S)
    assert time.monotonic() - killed_s < 20
    assert launcher.returncode == 1
    assert re.search(rf"error: rank [01] of 2 has died \(process {victim}\)\nerror: The actor is dead", told)
    assert resumed(folder, "killed") == numbers(folder / "runs" / "processes")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_reaches_every_rank_and_they_save(folder: Path, number: signal.Signals) -> None:
    launcher = begun(folder, number.name, *RAY)
    launcher.send_signal(number)
    said, told = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, told) == (130, "")
    assert said.splitlines()[-1] == f"continue: millrace resume {folder / 'runs' / number.name}"
    assert resumed(folder, number.name) == numbers(folder / "runs" / "processes")


def test_a_run_outlives_deaths_at_random_moments(folder: Path) -> None:
    words = ["--recipe", str(folder / "tiny.yaml"), "--kills", "2", "--apart", "1", "--accuracy", "0"]
    script = [sys.executable, str(ROOT / "scripts" / "kills.py"), *words, "steps=200", "evaluation.every=100"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\n2 deaths in \d+ s, no group lost or doubled; accuracy ", done.stdout), done.stdout
