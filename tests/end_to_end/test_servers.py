"""Runs whose engines are servers: the numbers of engines in processes, a killed one, a wrong one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.run.run import Controller
from tests.end_to_end.async_runs import check_run, events_of, run, trained
from tests.end_to_end.tiny import metrics_of, tiny_recipe
from tests.engines.sglang_twin import DROPPED, FAULT
from tests.family import below

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def servers_below(process: int) -> list[int]:
    """The servers that the engines of a run have started."""
    found = []
    for pid in below(process):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"millrace.engines.engine_server" in words and words[0].endswith(b"python"):
            found.append(pid)
    return found


def test_a_run_with_a_server_is_the_run_with_an_engine(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    for kind, count in (("millrace", 1), ("server", 1)):
        words = {"engine.kind": kind, "engine.num_engines": count, "steps": 3}
        assert run(tmp_path, kind, **words).status == "finished"
    ours, theirs = (tmp_path / "runs" / kind for kind in ("millrace", "server"))
    assert trained(ours) == trained(theirs)
    rewards = [
        [one["reward/mean"] for one in metrics_of(path) if "reward/mean" in one] for path in (ours, theirs)
    ]
    assert rewards[0] == rewards[1]
    assert all(one["mismatch/max"] < 1e-5 for one in metrics_of(theirs) if "mismatch/max" in one)


def test_a_killed_server_is_replaced(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    record, killed = Controller.record, set[int]()

    def kill(self: Controller, stage: str, numbers: dict[str, Any]) -> None:
        record(self, stage, numbers)
        if stage == "reinforcement" and self.progress.step == 2:
            for pid in {*servers_below(os.getpid())} - killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "record", kill)
        words = {"engine.kind": "server", "rollout.max_staleness": 2, "steps": 8}
        assert run(tmp_path, "killed", **words).status == "finished"
    assert len(killed) == 1
    path = tmp_path / "runs" / "killed"
    check_run(path, steps=8, bound=2)
    events = [event for one in events_of(path) for event in one.get("events", [one])]
    # A loss stands in the log once for each batch of events that it is in.
    reasons = {event["reason"] for event in events if event.get("kind") == "engine_lost"}
    assert ["was killed by SIGKILL" in one for one in reasons] == [True], reasons


def test_a_run_with_sglang_replaces_a_server_that_drops_a_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers are twins of SGLang, started with its command line; the first one keeps an older weight."""
    tiny_recipe(tmp_path)
    python = tmp_path / "python"
    # -P -m sglang.launch_server
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -m tests.engines.sglang_twin "$@"\n')
    python.chmod(0o755)
    fault = tmp_path / "fault"
    fault.write_text("dropped")
    monkeypatch.setenv(FAULT, str(fault))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    words = {"engine.kind": "sglang", "engine.python": str(python), "rollout.max_staleness": 1, "steps": 5}
    assert run(tmp_path, "sglang", **words).status == "finished"
    path = tmp_path / "runs" / "sglang"
    check_run(path, steps=5, bound=1)
    # The first batch is of the weights that the trainer still has.
    assert next(one["mismatch/max"] for one in metrics_of(path) if "mismatch/max" in one) < 1e-5
    events = [event for one in events_of(path) for event in one.get("events", [one])]
    (lost,) = {event["reason"] for event in events if event.get("kind") == "engine_lost"}
    assert "holds older weights after version" in lost
    assert DROPPED in lost
