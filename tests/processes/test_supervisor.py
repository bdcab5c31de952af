"""Children under a supervisor: overlapping requests, deadlines, losses, and children that do not start."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millrace.processes.child import WorkerProgram
from millrace.processes.supervisor import ChildFailed, ChildLost, ChildReply, Supervisor
from tests.house.source import ROOT
from tests.rewards.helpers import LIMIT_S, Often, child_of, is_running

pytestmark = pytest.mark.world


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    """Supervisors of a function of `workers`, closed afterwards."""
    made: list[Supervisor] = []

    def make(
        function: str, settings: Any = None, *, max_restarts: int = 0, clock: Any = None, **options: Any
    ) -> Supervisor:
        given: dict[str, Any] = {
            "name": "worker",
            "entry": f"tests.processes.workers:{function}",
            "settings": settings or {},
            "path": [str(ROOT), *sys.path],
            "environment": {"PATH": os.environ["PATH"]},
            "start_s": LIMIT_S,
            "max_reply_bytes": 1 << 22,
            **options,
        }
        clocks = {} if clock is None else {"clock": clock}
        made.append(Supervisor(lambda: WorkerProgram(**given), max_restarts=max_restarts, **clocks))
        if clock is not None:
            made[-1]._make_poll = Often
        return made[-1]

    yield make
    for one in made:
        one.close()


def events(supervisor: Supervisor, number: int = 1) -> list[ChildReply | ChildLost]:
    found: list[ChildReply | ChildLost] = []
    while len(found) < number:
        found += supervisor.wait()
    return found


def replies(supervisor: Supervisor, number: int = 1) -> list[tuple[int, bytes]]:
    return [(one.id, one.body) for one in events(supervisor, number) if isinstance(one, ChildReply)]


def lost(supervisor: Supervisor) -> ChildLost:
    (event,) = events(supervisor)
    assert isinstance(event, ChildLost)
    return event


def test_requests_overlap_and_are_answered_by_id_in_any_order(supervise):
    supervisor = supervise("reverse", overlapping=True)
    child = supervisor.start()
    ids = [child.request(body, LIMIT_S) for body in (b"a", b"b", b"c", b"go")]
    assert replies(supervisor, 4) == list(zip(reversed(ids), [b"go", b"c", b"b", b"a"], strict=True))
    assert not child.pending


def test_the_reply_to_a_cancelled_request_is_dropped_and_its_worker_told(supervise):
    supervisor = supervise("reverse", overlapping=True)
    child = supervisor.start()
    first, second = (child.request(body, LIMIT_S) for body in (b"a", b"b"))
    child.cancel(first)
    child.cancel(first)  # it may have been answered meanwhile
    told = child.request(b"cancelled", LIMIT_S)
    assert replies(supervisor) == [(told, b"[%d]" % first)]
    last = child.request(b"go", LIMIT_S)
    assert replies(supervisor, 2) == [(last, b"go"), (second, b"b")]
    again = child.request(b"go", LIMIT_S)
    assert replies(supervisor) == [(again, b"go")]  # and not the first one's, which came before


def test_what_a_worker_has_imported_is_left_out_of_garbage_collection(supervise):
    supervisor = supervise("collect")
    supervisor.start().request(b"count", LIMIT_S)
    ((_, counted),) = replies(supervisor)
    collects, num_kept, num_others = json.loads(counted)
    assert collects
    assert num_kept > 10 * num_others > 0


def test_children_work_at_once_and_each_reply_names_its_child(supervise):
    supervisor = supervise("echo")
    children = [supervisor.start() for _ in range(3)]
    for number, child in enumerate(children):
        child.request(b"%d" % number, LIMIT_S)
    found = events(supervisor, 3)
    assert {children.index(one.child): one.body for one in found} == {0: b"0", 1: b"1", 2: b"2"}


def test_a_message_without_reply_does_not_wait(supervise):
    supervisor = supervise("reverse")
    child = supervisor.start()
    child.request(b"go", LIMIT_S)
    assert replies(supervisor) == [(1, b"go")]
    child.notify(b"noted")
    assert not child.pending and supervisor.wait(-1.0) == []


def test_long_replies_and_much_output_pass(supervise):
    supervisor = supervise("echo")
    child = supervisor.start()
    for body in (b"long 4000000", b"flood", b"x" * (1 << 22)):
        child.request(body, LIMIT_S)
    assert [len(body) for _, body in replies(supervisor, 3)] == [4_000_000, 5, 1 << 22]


def test_a_reply_beyond_the_limit_loses_the_child(supervise):
    supervisor = supervise("echo", max_reply_bytes=1000)
    supervisor.start().request(b"long 1001", LIMIT_S)
    assert lost(supervisor).reason.startswith("wrote into its socket what is no frame: b")


def test_a_lost_child_is_named_with_its_end_its_output_and_what_it_had_to_do(supervise):
    supervisor = supervise("echo")
    child = supervisor.start()
    child.request(b"one", LIMIT_S)
    ids = [child.request(body, LIMIT_S) for body in (b"die", b"two")]
    reply, event = events(supervisor, 2)
    assert reply.body == b"one" and event.child is child and not event.late
    assert event.reason == "its process ended with exit code 3; the last it printed: last words"
    assert list(child.pending) == ids
    assert supervisor.children == []
    supervisor.start().request(b"three", LIMIT_S)
    assert replies(supervisor) == [(1, b"three")]


@pytest.mark.attack("a completion forges a verdict")
def test_a_forged_reply_loses_the_child_and_answers_nothing(supervise):
    supervisor = supervise("forge")
    child = supervisor.start()
    for body in (b"one", b"forge"):
        child.request(body, LIMIT_S)
    reply, event = events(supervisor, 2)
    assert reply.body == b"one"
    assert event.reason.startswith("wrote into its socket what is no frame: b") and list(child.pending) == [2]


def test_a_second_reply_to_a_request_loses_the_child(supervise):
    supervisor = supervise("echo")
    supervisor.start().request(b"twice", LIMIT_S)
    reply, event = events(supervisor, 2)
    assert reply.body == b"twice" and event.reason == "replied to request 1, which is not pending"


class Time:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_of_overlapping_requests_has_its_deadline(supervise):
    clock = Time()
    supervisor = supervise("reverse", clock=clock, overlapping=True)
    child = supervisor.start()
    child.request(b"go", 10.0)
    assert replies(supervisor) == [(1, b"go")]
    child.request(b"a", 30.0)
    clock.now_s = 5.0
    child.request(b"cancelled", 10.0)
    assert replies(supervisor) == [(3, b"[]")]
    assert child.deadline_s == 30.0
    child.request(b"b", 10.0)
    clock.now_s = 14.0
    assert supervisor.wait() == []
    clock.now_s = 15.0
    event = lost(supervisor)
    assert (event.reason, event.late) == ("took longer than 10 s", True)
    assert list(child.pending) == [2, 4]


def test_the_time_of_a_request_starts_when_the_one_before_it_is_answered(supervise):
    clock = Time()
    supervisor = supervise("echo", clock=clock)
    child = supervisor.start()
    child.request(b"one", 50.0)
    child.request(b"hang", 10.0)
    clock.now_s = 40.0
    assert replies(supervisor) == [(1, b"one")]
    assert child.deadline_s == 50.0
    clock.now_s = 50.0
    assert lost(supervisor).reason == "took longer than 10 s"


def test_a_request_that_waits_for_another_has_its_whole_time_and_cancelling_passes_it_on(supervise):
    clock = Time()
    supervisor = supervise("reverse", clock=clock)
    child = supervisor.start()
    first = child.request(b"a", 10.0)
    child.request(b"b", 20.0)
    while not child.started:
        supervisor.wait()
    clock.now_s = 9.0
    assert child.deadline_s == 10.0
    child.restart_timeouts()
    assert child.deadline_s == 19.0
    child.cancel(first)
    assert child.deadline_s == 29.0
    clock.now_s = 29.0
    assert lost(supervisor).reason == "took longer than 20 s"


@pytest.mark.attack("a reward prints without end")
def test_a_child_that_prints_without_end_does_not_outlive_its_deadline(supervise):
    clock = Time()
    supervisor = supervise("echo", clock=clock)
    child = supervisor.start()
    child.request(b"print", 10.0)
    while not child._tail:
        supervisor.wait()
    clock.now_s = 10.0
    assert lost(supervisor).reason == "took longer than 10 s"


def test_a_child_that_gives_a_reason_is_not_tried_again(supervise):
    supervisor = supervise("refuse", {"reason": "no files in ü"}, max_restarts=3)
    supervisor.start()
    with pytest.raises(ChildFailed, match="^worker did not start: no files in ü$") as failed:
        lost(supervisor)
    assert failed.value.refusal == "no files in ü" and supervisor.children == []


def test_children_that_die_at_their_start_are_started_again_a_few_times(supervise, tmp_path):
    settings = {"folder": str(tmp_path), "deaths": 2}
    supervisor = supervise("start_later", settings, max_restarts=2)
    for number in range(2):
        supervisor.start()
        reason = f"its process ended with exit code 1; the last it printed: start {number}"
        assert lost(supervisor).reason == reason
    child = supervisor.start()
    child.request(b"a", LIMIT_S)
    assert replies(supervisor) == [(1, b"a")]
    # One that has started counts from the beginning.
    for path in tmp_path.iterdir():
        path.unlink()
    child.request(b"die", LIMIT_S)
    assert "exit code 3" in lost(supervisor).reason
    for _ in range(2):
        supervisor.start()
        lost(supervisor)


def test_too_many_that_die_at_their_start_are_an_error_with_the_last_ones_reason(supervise, tmp_path):
    supervisor = supervise("start_later", {"folder": str(tmp_path), "deaths": 9}, max_restarts=1)
    supervisor.start()
    lost(supervisor)
    supervisor.start()
    with pytest.raises(ChildFailed) as failed:
        lost(supervisor)
    reason = "its process ended with exit code 1; the last it printed: start 1"
    assert str(failed.value) == f"worker did not start: {reason}" and not failed.value.refusal


def test_end_reaches_a_wait_of_another_thread_and_children_that_start_later(supervise):
    supervisor = supervise("echo")
    child = supervisor.start()
    child.request(b"a", LIMIT_S)
    replies(supervisor)
    child.request(b"hang", LIMIT_S)
    threading.Timer(0.1, supervisor.end).start()
    assert lost(supervisor).reason == "its process was killed by signal 9 (SIGKILL)"
    supervisor.start()
    with pytest.raises(ChildFailed, match="was killed by signal 9"):
        lost(supervisor)
    supervisor.close()
    supervisor.start().request(b"a", LIMIT_S)
    assert replies(supervisor) == [(1, b"a")]


def test_a_wait_for_nothing_is_refused(supervise):
    supervisor = supervise("echo")
    assert supervisor.wait(-1.0) == []
    with pytest.raises(RuntimeError, match="there is no child to wait for"):
        supervisor.wait()


def test_close_leaves_no_process(supervise):
    supervisor = supervise("echo")
    child = supervisor.start()
    child.request(b"a", LIMIT_S)
    replies(supervisor)
    worker = child_of(child._popen.pid)
    supervisor.close()
    assert not is_running(worker) and supervisor.children == []


def test_a_child_that_the_system_cannot_start_leaves_nothing_behind(supervise, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    before = os.listdir("/proc/self/fd")
    supervisor = supervise("echo", remove=str(folder), confine=lambda command: ["x" * (1 << 22)])
    with pytest.raises(OSError, match="Argument list too long"):
        supervisor.start()
    assert not folder.exists() and len(os.listdir("/proc/self/fd")) == len(before)
