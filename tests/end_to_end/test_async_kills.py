"""Engines and trainers killed at random moments while sampling is ahead of training: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from millrace.orchestration.controller import Controller
from millrace.orchestration.evaluate import Evaluation
from tests.end_to_end.async_runs import AHEAD, check_run, engines_below, events_of, prompts_of, run
from tests.end_to_end.rank_runs import processes_below
from tests.end_to_end.runs import LIMIT_S, check_equal, finished, start
from tests.end_to_end.tiny import tiny_recipe
from tests.rewards.helpers import ends_within

NUM_KILLS = 4
# Batches between two deaths: more than can be trained on without an engine.
APART = 4
STEPS = 12 * NUM_KILLS
LONGER = AHEAD | {"steps": 60}
# After its first batch a trainer lives at most so long, and no run takes longer than the other.
MOST_S, WHOLE_S = 2.0, 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def kill_engines(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> list[int]:
    """Have the engine of a run in this process killed so many times; who died is added to the list."""
    record, trainer = Controller.record, os.getpid()
    timers: list[threading.Timer] = []
    dead: list[int] = []
    died_at = [0]

    def kill(controller: Controller) -> None:
        (engine,) = engines_below(trainer)
        os.kill(engine, signal.SIGKILL)
        died_at.append(controller.progress.step)
        dead.append(engine)

    def deadly(self, stage, numbers):
        record(self, stage, numbers)
        # By then there is another engine.
        rested = self.progress.step >= died_at[-1] + APART
        if stage == "reinforcement" and rested and len(timers) == len(dead) < NUM_KILLS:
            # About the time of a batch, so that it dies at anything that it does.
            timers.append(threading.Timer(rng.uniform(0, 0.1), kill, [self]))
            timers[-1].start()

    monkeypatch.setattr(Controller, "record", deadly)
    return dead


def recoveries_s(events: list[dict]) -> list[float]:
    """Seconds from the loss of each engine until another one may draw."""
    lost_s = [event["time_s"] for event in events if event["kind"] == "lost"]
    loads_s = [event["time_s"] for event in events if event["kind"] == "load"]
    return [min(s for s in loads_s if s > since_s) - since_s for since_s in lost_s]


def resumptions_s(events: list[dict]) -> list[float]:
    """Seconds from the start of each process that took a run up to its first batch.

    The clock is that of the run: it goes on where it stood when the checkpoint was saved.
    """
    found, saved_s, resumed = [], 0.0, False
    for event in events:
        if event["kind"] == "save":
            saved_s = event["time_s"]
        if event["kind"] == "take" and resumed:
            found.append(event["time_s"] - saved_s)
        resumed = event["kind"] == "resume" or (resumed and event["kind"] != "take")
    return found


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_goes_on_by_itself_whenever_its_engine_is_killed(staleness, tmp_path, monkeypatch):
    tiny_recipe(tmp_path)
    settings = {"flow.staleness": staleness, "steps": STEPS, "deterministic": True}
    with monkeypatch.context() as patch:
        dead = kill_engines(patch, random.Random(staleness))
        report = run(tmp_path, "killed", **settings, **{"engine.processes": 1})
    killed = tmp_path / "runs" / "killed"
    assert report.status == "finished"
    assert len(set(dead)) == len(dead) == NUM_KILLS
    events = events_of(killed)
    fates = [event["kind"] for event in events if event["kind"] in ("lost", "joined")]
    assert fates == ["joined", *["lost", "joined"] * NUM_KILLS]
    print("an engine draws again after", *(f"{one:.1f} s" for one in recoveries_s(events)), flush=True)
    if staleness:
        check_run(killed, steps=STEPS, bound=staleness)
    else:
        run(tmp_path, "undisturbed", **settings, **{"engine.processes": 0})
        check_equal(killed, tmp_path / "runs" / "undisturbed")


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_engine_that_dies_in_an_evaluation_is_replaced_before_the_evaluation_ends(
    staleness, tmp_path, monkeypatch
):
    tiny_recipe(tmp_path)
    evaluate, dead = Controller.evaluate, []

    def deadly(controller: Controller) -> Evaluation:
        if controller.progress.stage == "reinforcement" and controller.progress.step and not dead:
            (engine,) = engines_below(os.getpid())
            os.kill(engine, signal.SIGKILL)
            dead.append(engine)
        return evaluate(controller)

    monkeypatch.setattr(Controller, "evaluate", deadly)
    settings = {"flow.staleness": staleness, "steps": 4, "evaluation.every": 2, "engine.processes": 1}
    report = run(tmp_path, "killed", **settings)
    assert report.status == "finished"
    assert len(dead) == 1
    fates = [e["kind"] for e in events_of(tmp_path / "runs" / "killed") if e["kind"] in ("lost", "joined")]
    assert fates == ["joined", "lost", "joined"]


def test_a_trainer_killed_at_any_moment_goes_on_and_leaves_nothing_behind(tmp_path):
    tiny_recipe(tmp_path)
    recipe, undisturbed = tmp_path / "tiny.yaml", tmp_path / "runs" / "undisturbed"
    assert not killed_after(recipe, undisturbed, WHOLE_S)
    check_run(undisturbed, steps=LONGER["steps"], bound=2)

    rng = random.Random(17)
    moments_s = [rng.uniform(0, MOST_S) for _ in range(NUM_KILLS)]
    num_killed, number = 0, 0
    while moments_s:
        number += 1
        path = tmp_path / "runs" / f"killed-{number}"
        while not finished(path):
            moment_s = moments_s.pop() if moments_s else WHOLE_S
            if killed_after(recipe, path, moment_s):
                num_killed += 1
            elif moment_s < WHOLE_S:
                # It was done before its moment came; the next run gets an earlier one.
                moments_s.insert(0, 0.8 * moment_s)
        check_run(path, steps=LONGER["steps"], bound=2)
        assert prompts_of(path) == prompts_of(undisturbed)
        print("a batch after", *(f"{one:.1f} s" for one in resumptions_s(events_of(path))), flush=True)
    assert num_killed == NUM_KILLS


def killed_after(recipe: Path, folder: Path, moment_s: float) -> bool:
    """Start a run or take it up; whether it had to be killed so long after its first batch.

    Raises:
        AssertionError: it failed by itself, or something that it started lives on.
    """
    begun_s = time.time()
    trainer = start(recipe, folder, **LONGER)
    assert trainer.pid is not None
    # Its start has no end in sight where the machine is busy, and is no part of what is tried here.
    while trainer.is_alive() and not any(p.stat().st_mtime > begun_s for p in folder.glob("rollouts/step-*")):
        assert time.time() < begun_s + WHOLE_S
        time.sleep(0.02)
    trainer.join(moment_s)
    below = processes_below(trainer.pid)
    killed = trainer.is_alive()
    if killed:
        trainer.kill()
        trainer.join(LIMIT_S)
    assert killed or trainer.exitcode == 0
    assert [process for process in below if not ends_within(process, LIMIT_S)] == []
    return killed
