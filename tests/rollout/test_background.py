"""A thread that hears events while the trainer trains."""

from __future__ import annotations

import threading
import time

import pytest

from millrace.rollout.backend import ScaleRequest
from millrace.rollout.background import BackgroundRollouts
from millrace.rollout.engine_pool import DrawFailed
from millrace.rollout.manager import Stalled
from tests.rollout.manual import Manual, rollouts_over, serving

PATIENCE_S = 60.0


class Quick(Manual):
    """Does at once what it is asked; `wait` is called by one thread at a time."""

    def __init__(self, *engines, reason="stop"):
        super().__init__(*engines, sleeps=True)
        self.reason, self.versions, self.waiting, self.threads = reason, {}, 0, set()
        self.begun_s = time.monotonic()

    def now(self):
        return time.monotonic() - self.begun_s

    def wait(self, timeout_s):
        assert not self.waiting
        self.waiting += 1
        self.threads.add(threading.current_thread().name)
        orders, self.orders = self.orders, []
        for kind, name, what in (order for order in orders if order[0] != "want"):
            if kind == "load":
                self.versions[name] = what
                self.events += serving(name, version=what)
            elif kind == "submit":
                version = self.versions[name]
                self.events += [self.drawn(id, version=version, reason=self.reason) for id in what]
            elif kind == "judge":
                self.events.append(self.judged(name))
        found = super().wait(timeout_s)
        self.waiting -= 1
        return found


@pytest.mark.world
def test_batches_come_while_nobody_advances():
    runtime = Quick("a", "b")
    rollouts, flow, _ = rollouts_over(runtime, staleness=1)
    numbers = []
    with BackgroundRollouts(rollouts, runtime) as pump:
        for version in range(1, 4):
            numbers += pump.next_batch(PATIENCE_S).taken.numbers
            pump.published(version)
        pump.wait_until_published(PATIENCE_S)
        words, _ = pump.state()
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert words["flow"]["num_taken"] == flow.num_published == 3
    assert runtime.threads == {"millrace-pump"}
    assert "millrace-pump" not in [thread.name for thread in threading.enumerate()]


def test_errors_of_the_thread_are_raised_where_somebody_waits():
    runtime = Quick("a", reason="error")
    rollouts, _, _ = rollouts_over(runtime)
    with BackgroundRollouts(rollouts, runtime) as pump:
        for _ in range(2):
            with pytest.raises(DrawFailed, match="the logits are not finite"):
                pump.next_batch(PATIENCE_S)


@pytest.mark.world
def test_what_was_half_decided_is_not_looked_at_before_its_error_is_told(monkeypatch):
    class Slow(threading.Condition):
        def __exit__(self, *error):
            super().__exit__(*error)
            if threading.get_ident() != trainer:
                time.sleep(0.3)

    trainer, waited, decided = threading.get_ident(), threading.Event(), []

    def failing(events):
        if waited.is_set():
            decided.append("half")
            raise OSError("the disk is full")

    def look():
        waited.set()
        return decided[0] if decided else None

    runtime = Quick("a")
    rollouts, _, _ = rollouts_over(runtime)
    monkeypatch.setattr(rollouts, "handle", failing)
    monkeypatch.setattr("millrace.rollout.background.threading.Condition", Slow)
    with BackgroundRollouts(rollouts, runtime) as pump, pytest.raises(OSError, match="the disk is full"):
        pump.until(look, "something", PATIENCE_S)
    assert decided == ["half"]


@pytest.mark.world
def test_a_stall_is_found_by_who_waits():
    runtime = Quick()
    rollouts, _, _ = rollouts_over(runtime)
    with BackgroundRollouts(rollouts, runtime) as pump:
        with pytest.raises(Stalled, match="trainer waits for batch 0 .* an engine that serves"):
            pump.next_batch(0.05)
        assert pump.blockers()[0] == "an engine that serves"


@pytest.mark.world
def test_nothing_is_decided_while_it_is_paused():
    runtime = Quick("a")
    rollouts, _, notes = rollouts_over(runtime, staleness=1)
    with BackgroundRollouts(rollouts, runtime) as pump:
        pump.next_batch(PATIENCE_S)
        with pump.paused():
            words, _ = pump.state()
            pump.published(1)
            known = list(notes)
            time.sleep(0.1)
            assert notes == known
        pump.wait_until_published(PATIENCE_S)
    assert words["flow"]["num_taken"] == 1
    assert notes.of("publish") == [{"kind": "publish", "version": 1}]


@pytest.mark.world
def test_what_is_asked_from_outside_is_heard_with_the_rest():
    runtime, asked = Quick("a"), [[ScaleRequest(2)]]
    rollouts, _, notes = rollouts_over(runtime, staleness=1)
    with BackgroundRollouts(rollouts, runtime, lambda: asked.pop() if asked else []) as pump:
        pump.next_batch(PATIENCE_S)
        begun_s = time.monotonic()
        while (found := pump.engines()).wanted != 2:
            assert time.monotonic() - begun_s < PATIENCE_S
    assert list(found.doing) == ["a"]
    assert sum("wanted 2" in event["events"] for event in notes.of("heard")) == 1


@pytest.mark.world
def test_a_thread_that_is_stuck_is_named():
    """As in an environment that hangs: the watchdog must not hang with it."""

    class Stuck:
        def __init__(self, prompt):
            self.prompt = prompt

        def observe(self):
            return self.prompt.token_ids

        def step(self, drawn):
            assert release.wait(PATIENCE_S)
            return None

    release = threading.Event()
    runtime = Quick("a")
    rollouts, _, _ = rollouts_over(runtime, environment=Stuck)
    with BackgroundRollouts(rollouts, runtime) as pump:
        begun_s = time.monotonic()
        while pump.blockers() != ["millrace-pump (handles what happened)"]:
            assert time.monotonic() - begun_s < PATIENCE_S
        # What is known of engines is older then.
        assert pump.engines().doing.keys() == {"a"}
        release.set()
        assert len(pump.next_batch(PATIENCE_S).groups) == 2
