"""Thousands of fault schedules, and that they would find a controller that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest

from millrace.eventlog.log import check_log
from millrace.rollout.backend import Retire
from millrace.rollout.dispatcher import Dispatcher
from millrace.rollout.engine_pool import EnginePool, _Engine
from millrace.rollout.episodes import Sample
from millrace.rollout.manager import RolloutManager
from tests.house.scripts import load_script
from tests.house.source import ROOT

NUM_SCHEDULES = 600
# A controller that is wrong is found among so many.
NUM_SABOTAGED = 400


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    return load_script("chaos")


@pytest.mark.slow
def test_no_schedule_loses_a_group(chaos):
    """And the schedules are what they should be: every fault happens, and most runs end well all the same."""
    ends, seen, commands = Counter(), Counter(), Counter()
    for number in range(NUM_SCHEDULES):
        run = chaos.Run(number)
        try:
            ends[run.run()] += 1
        except Exception as error:
            raise AssertionError(f"schedule {number} broke") from error
        commands[run.schedule.rules.order, run.schedule.rules.stale] += 1
        seen.update(f"{event['kind']} {event.get('reason', '')[:11]}" for event in run.known.events)
    assert set(ends) == {"done", "EnginesGone"}
    assert ends["done"] > 0.97 * NUM_SCHEDULES
    assert len(commands) == 5
    faults = {
        "resume ": "the trainer died",
        "abort_in_flight ": "engines returned their partial output",
        "restored ": "and continued from it",
        "engine_lost it died": "an engine crashed",
        "scale ": "another number of engines was asked for",
        "scale there is n": "and could not be had",
        "engine_lost it was dra": "and an engine was drained",
        "engine_lost it hangs": "an engine hung",
        "engine_lost a request t": "nobody noticed that an engine hung",
        "engine_lost version 1": "a load was never verified",
        "engine_lost it does no": "a load broke",
        "ignored engine": "an engine answered late or twice",
        "ignored call": "a reward answered twice",
        "drop stale": "a group was too old",
        "drop spare": "a group was not needed",
    }
    missing = [what for fault, what in faults.items() if not any(kind.startswith(fault) for kind in seen)]
    assert missing == []


def test_a_schedule_repeats_itself_and_its_log_is_plain(chaos):
    for number in range(3):
        one, other = chaos.Run(number), chaos.Run(number)
        assert one.run() == other.run()
        assert one.known.events == other.known.events
        assert check_log(json.loads(json.dumps(one.known.events))) == []


def lose_a_request(monkeypatch):
    lost = EnginePool.engine_lost
    monkeypatch.setattr(EnginePool, "engine_lost", lambda self, event: lost(self, event)[1:])


def free_tickets_too_early(monkeypatch):
    monkeypatch.setattr(EnginePool, "in_force", property(lambda self: self.newest_step))


def accept_answers_twice(monkeypatch):
    completed = Dispatcher.completed

    def twice(self, event):
        before = self._in_flight.get(event.id)
        sample = completed(self, event)
        if before is not None and event.id not in self._in_flight and event.engine in self._pool._engines:
            self._in_flight[event.id] = before
            self._pool._engines[event.engine].requests[event.id] = 0.0
        return sample

    monkeypatch.setattr(Dispatcher, "completed", twice)


def resubmit_with_other_seeds(monkeypatch):
    submit = EnginePool.submit

    def other(self, name, requests):
        seeds = [hash((request.params.seed, name)) for request in requests]
        submit(
            self,
            name,
            [replace(d, params=replace(d.params, seed=s)) for d, s in zip(requests, seeds, strict=True)],
        )

    monkeypatch.setattr(EnginePool, "submit", other)


def serve_unverified(monkeypatch):
    def accept(self, event):
        self._engines[event.engine].requests.pop(event.id)
        return True

    monkeypatch.setattr(EnginePool, "accept", accept)


def let_new_engines_serve_old_weights(monkeypatch):
    verified = EnginePool._set_verified

    def at_once(self, name, version, *, at):
        self._engines[name].serves = True
        verified(self, name, version, at=at)

    monkeypatch.setattr(EnginePool, "_set_verified", at_once)


def forget_what_was_unfinished(monkeypatch):
    def begin(self, version):
        self._pool.begin(version, self._staleness.num_updates)
        self.start()

    monkeypatch.setattr(RolloutManager, "begin", begin)


def never_give_up(monkeypatch):
    monkeypatch.setattr(EnginePool, "stop_overdue", lambda self: setattr(self, "_due_s", float("inf")))


def keep_submitting_to_draining_engines(monkeypatch):
    monkeypatch.setattr(_Engine, "may_continue", lambda self, step: self.serves and self.step >= step)


def retire_at_once(monkeypatch):
    """Its partial output is lost, and its requests are not resubmitted."""

    def retire(self, name):
        if self._engines[name].draining:
            self._engines[name].requests.clear()
            self._backend.execute(Retire(name))

    monkeypatch.setattr(EnginePool, "_retire_drained", retire)


def take_the_wrong_group(monkeypatch):
    finish = RolloutManager._finish

    def swapped(self, number, outcomes):
        finish(self, number, outcomes)
        others = [other for other in self._finished if other != number]
        if others:
            a, b = self._finished[others[0]], self._finished[number]
            self._finished[others[0]], self._finished[number] = b, a

    monkeypatch.setattr(RolloutManager, "_finish", swapped)


def resume_without_saved_environments(monkeypatch):
    restore = Sample.restore

    def forgetting(self, trajectory, progress):
        restore(self, trajectory, replace(progress, saved=None))

    monkeypatch.setattr(Sample, "restore", forgetting)


def forget_which_turn_a_branch_follows(monkeypatch):
    observe = Sample.observe
    monkeypatch.setattr(
        Sample, "observe", lambda self, token_ids, state="", after=None: observe(self, token_ids, state)
    )


@pytest.mark.parametrize(
    "sabotage",
    [
        lose_a_request,
        free_tickets_too_early,
        accept_answers_twice,
        resubmit_with_other_seeds,
        serve_unverified,
        let_new_engines_serve_old_weights,
        forget_what_was_unfinished,
        never_give_up,
        keep_submitting_to_draining_engines,
        retire_at_once,
        take_the_wrong_group,
        pytest.param(resume_without_saved_environments, marks=pytest.mark.slow),
        forget_which_turn_a_branch_follows,
    ],
)
def test_a_controller_that_is_wrong_is_found(chaos, monkeypatch, sabotage):
    sabotage(monkeypatch)
    assert any(chaos.tried(number)[1] == "broken" for number in range(NUM_SABOTAGED))


@pytest.mark.world
def test_the_script_says_how_it_went(chaos, monkeypatch):
    command = [sys.executable, "-W", "error", str(ROOT / "scripts" / "chaos.py"), "--schedules", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("20 schedules in ")
