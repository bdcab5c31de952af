"""A thread that hears events while the trainer trains."""

from __future__ import annotations

import threading
import time

import pytest

from millrace.rollout.backend import ScaleRequest, Score
from millrace.rollout.background import BackgroundRollouts
from millrace.rollout.engine_pool import GenerationFailed
from millrace.rollout.manager import Stalled
from millrace.rollout.recorder import RecordingBackend
from tests.rollout.manual import Manual, Notes, rollouts_over, serving

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
        commands, self.commands = self.commands, []
        for kind, name, what in (command for command in commands if len(command) == 3):
            if kind == "load":
                self.versions[name] = what
                self.events += serving(name, version=what)
            elif kind == "submit":
                version = self.versions[name]
                self.events += [self.generated(id, version=version, reason=self.reason) for id in what]
            elif kind == "score":
                self.events.append(self.scored(name))
        super().wait(timeout_s)
        self.waiting -= 1


@pytest.mark.world
def test_batches_come_while_nobody_advances():
    backend = Quick("a", "b")
    rollouts, controller, _ = rollouts_over(backend, staleness=1)
    numbers = []
    with BackgroundRollouts(rollouts, backend) as background:
        for version in range(1, 4):
            numbers += background.next_batch(PATIENCE_S).taken.numbers
            background.update_weights(version)
        background.wait_for_weights(PATIENCE_S)
        state, _ = background.state()
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert state["staleness"]["num_taken"] == controller.num_updates == 3
    assert backend.threads == {"millrace-rollouts"}
    assert "millrace-rollouts" not in [thread.name for thread in threading.enumerate()]


def test_errors_of_the_thread_are_raised_where_somebody_waits():
    backend = Quick("a", reason="error")
    rollouts, _, _ = rollouts_over(backend)
    with BackgroundRollouts(rollouts, backend) as background:
        for _ in range(2):
            with pytest.raises(GenerationFailed, match="the logits are not finite"):
                background.next_batch(PATIENCE_S)


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

    backend = Quick("a")
    rollouts, _, _ = rollouts_over(backend)
    monkeypatch.setattr(rollouts, "handle", failing)
    monkeypatch.setattr("millrace.rollout.background.threading.Condition", Slow)
    with (
        BackgroundRollouts(rollouts, backend) as background,
        pytest.raises(OSError, match="the disk is full"),
    ):
        background.until(look, "something", PATIENCE_S)
    assert decided == ["half"]


@pytest.mark.world
def test_a_stall_is_found_by_who_waits():
    backend = Quick()
    rollouts, _, _ = rollouts_over(backend)
    with BackgroundRollouts(rollouts, backend) as background:
        with pytest.raises(Stalled, match="trainer waits for batch 0 .* an engine that serves"):
            background.next_batch(0.05)
        assert background.blockers()[0] == "an engine that serves"


@pytest.mark.world
def test_nothing_is_decided_while_it_is_locked():
    backend = Quick("a")
    rollouts, _, notes = rollouts_over(backend, staleness=1)
    with BackgroundRollouts(rollouts, backend) as background:
        background.next_batch(PATIENCE_S)
        with background.locked():
            state, _ = background.state()
            background.update_weights(1)
            known = list(notes)
            time.sleep(0.1)
            assert notes == known
        background.wait_for_weights(PATIENCE_S)
    assert state["staleness"]["num_taken"] == 1
    assert notes.of("weights_updated") == [{"kind": "weights_updated", "step": 1}]


@pytest.mark.world
def test_scale_requests_are_handled_with_the_other_events():
    requests, notes = [[ScaleRequest(2)]], Notes()
    backend = RecordingBackend(Quick("a"), notes.add, lambda: requests.pop() if requests else [])
    rollouts, _, _ = rollouts_over(backend, staleness=1, notes=notes)
    with BackgroundRollouts(rollouts, backend) as background:
        background.next_batch(PATIENCE_S)
        begun_s = time.monotonic()
        while (found := background.engines()).target != 2:
            assert time.monotonic() - begun_s < PATIENCE_S
    assert list(found.activity) == ["a"]
    request = {"kind": "scale_request", "number": 2, "reason": "", "id": ""}
    assert sum(request in event["events"] for event in notes.of("events_received")) == 1


@pytest.mark.world
def test_a_thread_that_is_stuck_is_named():
    """As in a backend that hangs: the watchdog must not hang with it."""

    class Stuck(Quick):
        def execute(self, command):
            if isinstance(command, Score):
                assert release.wait(PATIENCE_S)
            super().execute(command)

    release = threading.Event()
    backend = Stuck("a")
    rollouts, _, _ = rollouts_over(backend)
    with BackgroundRollouts(rollouts, backend) as background:
        begun_s = time.monotonic()
        while background.blockers() != ["millrace-rollouts (handles events)"]:
            assert time.monotonic() - begun_s < PATIENCE_S
        # What is known of engines is older then.
        assert background.engines().activity.keys() == {"a"}
        release.set()
        assert len(background.next_batch(PATIENCE_S).groups) == 2
