"""Ctrl-C once asks, twice leaves."""

from __future__ import annotations

import signal
import threading

import pytest

from millrace.orchestration.interrupt import Interrupts


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
    thread.join(10)
    assert seen == [(False, True)]
