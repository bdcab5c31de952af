"""Runs with environments in workers: killed and resumed from saved states, and replayed with them live."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from millrace.environments.guess import Guess
from millrace.eventlog.log import check_log
from millrace.replay.recorded_log import ReplayError
from millrace.replay.replay import replay
from millrace.rollout.sampled_batch import completion_seed
from millrace.run.loop import resume, train
from millrace.run.run import Controller
from millrace.types import Reply
from tests.end_to_end.async_runs import events_of
from tests.end_to_end.test_environments import CHANCE, recipe
from tests.forked import fork_engines, process

pytestmark = pytest.mark.slow
LIMIT_S = 300.0
# Episodes of the first two batches, but for the first sample of each group.
EARLY = 24


class Traced:
    """Three turns. It is saved, and writes each call to a file; later episodes wait in their second turn."""

    @staticmethod
    def rows(count, seed, **options):
        return Guess.rows(count, seed)

    def __init__(self, trace: str = "") -> None:
        self.trace, self.num = Path(trace), 0

    def begin(self, task):
        self.key, self.waits = f"{task.seed}.{task.sample}", False
        if task.sample:
            self._note("begin")
            self.waits = self.trace.read_text().count("begin") > EARLY
        return Reply()

    def step(self, action):
        self.num += 1
        if self.waits and self.num == 2:
            self._note("waits")
            end_s = time.monotonic() + LIMIT_S
            while not self.trace.with_name("go").exists() and time.monotonic() < end_s:
                time.sleep(0.01)
        self._note(str(self.num))
        done = self.num == 3
        return Reply("<", done=done, score=float(action.text in "123") if done else 0.0)

    def save(self):
        return [self.key, self.num]

    def load(self, task, saved):
        self.key, self.num = saved
        self.waits = False
        self._note("load")

    def _note(self, what):
        with self.trace.open("a") as file:
            file.write(f"{self.key} {what}\n")


def traced(folder: Path):
    environment = {
        "kind": "function",
        "function": "tests.end_to_end.test_environment_live:Traced",
        "options": {"trace": str(folder / "trace")},
        "max_turns": 4,
        "on_length": "continue",
    }
    ahead = {"rollout.max_staleness": 1, "engine.num_engines": 1, "data.eval_size": 2}
    return recipe(folder, "killed", environment=environment, **ahead)


def dies(folder: Path) -> None:
    """Train until the second batch is saved while later episodes wait in their second turn; then die."""
    fork_engines()
    checkpoint, leave = Controller.checkpoint, Controller.leave_if_asked

    def saving(self, *given):
        end_s = time.monotonic() + LIMIT_S
        while self.progress.step == 2 and "waits" not in (folder / "trace").read_text():
            assert time.monotonic() < end_s, "no episode waits"
            time.sleep(0.01)
        checkpoint(self, *given)

    def leaving(self, *given):
        leave(self, *given)
        if self.progress.stage == "reinforcement" and self.progress.step == 2:
            self._saver.settle()
            os.kill(os.getpid(), signal.SIGKILL)

    Controller.checkpoint, Controller.leave_if_asked = saving, leaving
    train(traced(folder), quiet=True)


def test_a_killed_run_goes_on_from_saved_environments_without_their_steps(tmp_path):
    (tmp_path / "trace").touch()
    trainer = process(dies, tmp_path, name="trainer")
    trainer.join(LIMIT_S)
    assert trainer.exitcode == -signal.SIGKILL
    trainer.close()
    (tmp_path / "go").touch()
    run = tmp_path / "runs" / "killed"
    assert resume(run, quiet=True).status == "finished"
    events = events_of(run)
    assert check_log(events) == [] and not any(event["kind"] == "episode_failed" for event in events)
    calls = Counter((tmp_path / "trace").read_text().splitlines())
    restored = [
        f"{completion_seed(traced(tmp_path).seed, event['number'])}.{sample}"
        for event in events
        if event["kind"] == "restored"
        for sample, turns in enumerate(event["turns"])
        if turns == 2 and sample
    ]
    # Their first turn was replied to, and the reply to their second one is what they waited for.
    waited = [key for key in restored if calls[f"{key} load"]]
    assert waited
    for key in waited:
        assert [calls[f"{key} {what}"] for what in ("begin", "1", "load", "3")] == [1, 1, 1, 1]
    # Live, the environments of the resumed part are loaded, too.
    found = replay(run, live=True, quiet=True)
    assert found.weights[-1] == "step-000004" and found.num_replies > found.num_episodes > 0


def test_a_live_environment_that_replies_otherwise_is_named(tmp_path):
    ahead = {"rollout.max_staleness": 1, "engine.num_engines": 1, "steps": 2, "checkpoint.every": 2}
    report = train(recipe(tmp_path, "ahead", **CHANCE, **ahead), quiet=True)
    with pytest.raises(ReplayError) as caught:
        replay(Path(report.run), live=True, quiet=True)
    # The live environments ended with the replay.
    assert "millrace-environments" not in {thread.name for thread in threading.enumerate()}
    message = str(caught.value)
    assert "live environments reply otherwise in " in message
    assert "the first difference is at step 1, group " in message
    assert "text was '<' in the run and is '>' live" in message or "text was '>' in" in message
