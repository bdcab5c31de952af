"""Ctrl-C once asks, twice leaves; a run of limited time leaves before it is over."""

from __future__ import annotations

import signal
import threading

import pytest

from millrace.run.signals import Deadline, Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_leaves(number):
    said: list[str] = []
    before = signal.getsignal(number)
    with Interrupts(said.append) as interrupts:
        assert not interrupts.asked
        signal.raise_signal(number)
        assert interrupts.asked
        assert said == ["finishing this step, then saving; once more leaves now"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
    assert len(said) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_all_is_saved_the_first_signal_leaves(number):
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        interrupts.leave_at_once_if(lambda: True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert (interrupts.asked, interrupts.left, interrupts.twice) == (True, True, False)
    assert said == ["leaving before the first step is done; nothing is lost"]


def test_the_signals_are_given_back_also_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interrupts(lambda text: None):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_nothing_is_caught():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with Interrupts(seen.append) as interrupts:
            seen.append((interrupts.asked, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [(False, True)]


def looks(limit_s: float | None, *times_s: float, save_s: float = 0.0) -> list[bool]:
    """What is said after steps that end at these times, of a run that began at 100."""
    clock = iter(times_s)
    deadline = Deadline(limit_s, 100.0, clock=lambda: next(clock))
    return [deadline.near(save_s) for _ in times_s]


def test_a_run_leaves_when_less_time_is_left_than_its_longest_step_took():
    assert looks(100.0, 110.0, 120.0, 180.0, 181.0) == [False, False, True, True]
    assert looks(100.0, 110.0, 140.0, 150.0, 170.0, 171.0) == [False, False, False, False, True]
    # What is left may take as long as it is.
    assert looks(100.0, 110.0, 190.0, 190.5) == [False, True, True]
    assert looks(100.0, 150.0) == [False]
    assert looks(100.0, 150.1) == [True]


def test_a_save_must_fit_behind_the_next_step():
    assert looks(100.0, 110.0, 120.0, 175.0, save_s=25.0) == [False, False, True]
    assert looks(100.0, 120.0, 140.0, 155.0, 160.0, save_s=25.0) == [False, False, False, True]


def test_without_a_limit_a_run_never_leaves_by_itself():
    assert looks(None, 1e9, 2e9) == [False, False]
