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
from millrace.rollout.dispatcher import Dispatcher
from millrace.rollout.engine_pool import EnginePool, _Engine
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
    ends, seen, orders = Counter(), Counter(), Counter()
    for number in range(NUM_SCHEDULES):
        run = chaos.Run(number)
        try:
            ends[run.run()] += 1
        except Exception as error:
            raise AssertionError(f"schedule {number} broke") from error
        orders[run.schedule.rules.order, run.schedule.rules.stale] += 1
        seen.update(f"{event['kind']} {event.get('reason', '')[:11]}" for event in run.known.events)
    assert set(ends) == {"done", "EnginesGone"}
    assert ends["done"] > 0.97 * NUM_SCHEDULES
    assert len(orders) == 5
    faults = {
        "resume ": "the trainer died",
        "hold ": "engines handed over what they had drawn",
        "keep ": "and went on with that",
        "lost it died": "an engine crashed",
        "want ": "another number of engines was asked for",
        "want there is n": "and could not be had",
        "lost it was ret": "and an engine was retired",
        "lost it hangs": "an engine hung",
        "lost a draw too": "nobody noticed that an engine hung",
        "lost version 1": "a load was never proved",
        "lost it does no": "a load broke",
        "ignore engine": "an engine answered late or twice",
        "ignore call": "a reward answered twice",
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


def lose_a_draw(monkeypatch):
    lost = EnginePool.lost
    monkeypatch.setattr(EnginePool, "lost", lambda self, event: lost(self, event)[1:])


def free_tickets_too_early(monkeypatch):
    monkeypatch.setattr(EnginePool, "in_force", property(lambda self: self.newest))


def accept_answers_twice(monkeypatch):
    drawn = Dispatcher.drawn

    def twice(self, event):
        before = self._drawing.get(event.id)
        sample = drawn(self, event)
        if before is not None and event.id not in self._drawing and event.engine in self._fleet._engines:
            self._drawing[event.id] = before
            self._fleet._engines[event.engine].draws[event.id] = 0.0
        return sample

    monkeypatch.setattr(Dispatcher, "drawn", twice)


def draw_again_with_other_seeds(monkeypatch):
    submit = EnginePool.submit

    def other(self, name, draws):
        seeds = [hash((draw.params.seed, name)) for draw in draws]
        submit(
            self,
            name,
            [replace(d, params=replace(d.params, seed=s)) for d, s in zip(draws, seeds, strict=True)],
        )

    monkeypatch.setattr(EnginePool, "submit", other)


def serve_without_proof(monkeypatch):
    def accept(self, event):
        self._engines[event.engine].draws.pop(event.id)
        return True

    monkeypatch.setattr(EnginePool, "accept", accept)


def let_new_engines_draw_with_old_weights(monkeypatch):
    prove = EnginePool._prove

    def at_once(self, name, version, *, at):
        self._engines[name].serves = True
        prove(self, name, version, at=at)

    monkeypatch.setattr(EnginePool, "_prove", at_once)


def forget_what_was_unfinished(monkeypatch):
    def begin(self, version):
        self._fleet.begin(version, self._flow.num_published)
        self.start()

    monkeypatch.setattr(RolloutManager, "begin", begin)


def never_give_up(monkeypatch):
    monkeypatch.setattr(EnginePool, "overdue", lambda self: setattr(self, "_due_s", float("inf")) or [])


def keep_asking_who_leaves(monkeypatch):
    monkeypatch.setattr(_Engine, "may_draw", lambda self, birth: self.serves and self.birth >= birth)


def retire_at_once(monkeypatch):
    """What it has is never handed over, and never drawn again."""

    def let_go(self, name):
        if self._engines[name].leaves:
            self._engines[name].draws.clear()
            self._runtime.retire(name)

    monkeypatch.setattr(EnginePool, "_let_go", let_go)


def take_the_wrong_group(monkeypatch):
    finish = RolloutManager._finish

    def swapped(self, number, outcomes):
        finish(self, number, outcomes)
        others = [other for other in self._finished if other != number]
        if others:
            a, b = self._finished[others[0]], self._finished[number]
            self._finished[others[0]], self._finished[number] = b, a

    monkeypatch.setattr(RolloutManager, "_finish", swapped)


@pytest.mark.parametrize(
    "sabotage",
    [
        lose_a_draw,
        free_tickets_too_early,
        accept_answers_twice,
        draw_again_with_other_seeds,
        serve_without_proof,
        let_new_engines_draw_with_old_weights,
        forget_what_was_unfinished,
        never_give_up,
        keep_asking_who_leaves,
        retire_at_once,
        take_the_wrong_group,
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
