"""Engines in processes of their own: exact at staleness 0, within the bound beyond, and taken up again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from millrace.run.run import Controller
from millrace.run.status import Status, read_status
from tests.end_to_end.async_runs import (
    AHEAD,
    check_run,
    engines_below,
    events_of,
    go_on,
    prompts_of,
    run,
)
from tests.end_to_end.runs import LIMIT_S, check_equal, start
from tests.end_to_end.tiny import tiny_recipe
from tests.family import below
from tests.rewards.helpers import ends_within

pytestmark = pytest.mark.world

# Of a run that is bit for bit another one's.
EXACT = {"deterministic": True, "rollout.dynamic_sampling_rounds": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the tiny recipe, and a run of it, `ahead`, whose sampling was ahead of training."""
    folder = tmp_path_factory.mktemp("async")
    tiny_recipe(folder)
    assert run(folder, "ahead", **AHEAD).status == "finished"
    return folder


def decisions(path: Path, *kinds: str) -> list[dict]:
    """The events of these kinds, in order."""
    return [{**event, "time_s": 0} for event in events_of(path) if event["kind"] in kinds]


@pytest.mark.slow
def test_at_staleness_0_it_makes_no_difference_where_the_engine_is(folder):
    for name, processes in (("here", 0), ("there", 1)):
        run(folder, name, **EXACT, **{"engine.num_engines": processes})
    here, there = folder / "runs" / "here", folder / "runs" / "there"
    check_equal(there, here)
    # Answers arrive one by one where the engine is elsewhere, and all together where it is not. There others
    # may be started while the trainer saves; what it does itself has one order.
    for kinds in (
        ("begin", "start", "drop", "take", "weights_updated"),
        ("begin", "take", "weights_updated", "update_weights", "save"),
    ):
        assert decisions(there, *kinds) == decisions(here, *kinds)
    assert any(event["kind"] == "take" and event["left_out"] for event in events_of(here))
    # Otherwise both might have kept the weights they began with.
    assert len(set(map(str, prompts_of(here)))) > 1


def test_sampling_is_ahead_of_training_and_never_by_more_than_the_bound(folder):
    greatest = check_run(folder / "runs" / "ahead", steps=AHEAD["steps"], bound=2)
    # The first three batches start together, before anything is trained.
    assert greatest[:3] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flow",
    [
        {"rollout.batch_order": "completion", "rollout.stale_policy": "drop", "rollout.kv_on_update": "keep"},
        pytest.param({"rollout.partial_rollout": False}, marks=pytest.mark.slow),
    ],
    ids=["dropping", "uninterrupted"],
)
def test_the_bound_holds_whatever_becomes_of_old_groups(flow, folder):
    name = "-".join(flow)
    run(folder, name, **AHEAD, **flow)
    greatest = check_run(folder / "runs" / name, steps=AHEAD["steps"], bound=2)
    assert max(greatest) > 0
    if "rollout.partial_rollout" in flow:
        arrived = [event for event in events_of(folder / "runs" / name) if event["kind"] == "completed"]
        assert all(event["oldest_step"] == event["newest_step"] for event in arrived)


@pytest.mark.slow
def test_left_with_ctrl_c_and_taken_up_no_group_is_lost_or_trained_twice(folder, monkeypatch):
    record, before = Controller.record, set(below(os.getpid()))

    def pressing(self, stage, numbers):
        record(self, stage, numbers)
        if (stage, self.progress.step) == ("reinforcement", 5):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "record", pressing)
        assert run(folder, "left", **AHEAD).status == "interrupted"
    # Servers of other tests may have been here before.
    assert set(below(os.getpid())) <= before
    assert go_on(folder, "left").status == "finished"
    left = folder / "runs" / "left"
    check_run(left, steps=AHEAD["steps"], bound=2)
    assert [event["taken"] for event in events_of(left) if event["kind"] == "resume"] == [5]
    assert prompts_of(left) == prompts_of(folder / "runs" / "ahead")


@pytest.mark.slow
def test_while_its_engine_hangs_a_run_says_so_and_killed_it_leaves_nothing_behind(folder):
    path = folder / "runs" / "killed"
    # Long enough that it is not over when it is looked at, and evaluated only at its end.
    longer = AHEAD | {"steps": 40, "evaluation.every": 100}
    trainer = start(folder / "tiny.yaml", path, **longer)
    assert trainer.pid is not None
    wait_until(lambda: [one for one in path.glob("checkpoints/step-*") if one.name != "step-000000"])
    (engine,) = engines_below(trainer.pid)
    started = below(trainer.pid)
    os.kill(engine, signal.SIGSTOP)

    def stuck() -> Status | None:
        # Until the rewards have judged what the engine drew before, the trainer waits for those.
        found = read_status(path)
        held = [on for wait in found.waits for on in wait.on]
        return found if held and all("engine-0" in on for on in held) else None

    status = wait_until(stuck)
    assert (status.state, status.pid, status.stage) == ("running", trainer.pid, "reinforcement")
    (wait,) = [wait for wait in status.waits if wait.on]
    assert wait.owner == "trainer"
    # Whatever it was about to do: take a batch, publish weights, or keep partial samples in a checkpoint.
    assert wait.reason in ("its next batch", "engines to return their partial output") or (
        wait.reason.endswith(" to be in force")
    )

    trainer.kill()
    trainer.join(LIMIT_S)
    assert engine in started
    assert [process for process in started if not ends_within(process, LIMIT_S)] == []
    assert read_status(path).state == "killed"
    assert go_on(folder, "killed").status == "finished"
    check_run(path, steps=longer["steps"], bound=2)
    assert prompts_of(path)[: AHEAD["steps"]] == prompts_of(folder / "runs" / "ahead")


def wait_until(there):
    """What is there in the end.

    Raises:
        AssertionError: nothing was, in time.
    """
    ends_s = time.monotonic() + LIMIT_S
    while not (found := there()):
        assert time.monotonic() < ends_s
        time.sleep(0.005)
    return found
