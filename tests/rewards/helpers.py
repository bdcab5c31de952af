"""What the tests of isolated rewards share."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.rewards.isolated import IsolatedReward
from millrace.types import Outcome, Prompt
from tests.family import is_running

# Longer than anything takes here: where this time is over, something hangs.
LIMIT_S = 60.0


class Clock:
    """Stands still, except that each look finds it 1000 s later while a judge hangs."""

    def __init__(self, hangs: Callable[[], bool]) -> None:
        self.now_s, self._hangs = 0.0, hangs

    def __call__(self) -> float:
        if self._hangs():
            self.now_s += 1000.0
        return self.now_s


class Often:
    """Has its caller look at a clock of the test every 20 ms, whatever that clock says."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register = self._poll.register

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        return self._poll.poll(20)


def prompts(num: int, row: dict[str, Any] | None = None) -> list[Prompt]:
    return [Prompt("train:0", (1,), "the prompt", "the answer", row or {})] * num


def score(reward: IsolatedReward, *completions: str) -> list[Outcome]:
    return reward.score(prompts(len(completions)), completions)


def calls() -> list[str]:
    return Path("calls.txt").read_text().splitlines()


def hangs() -> bool:
    """Whether a judge has written that it hangs from here on, and is still there."""
    path = Path("hangs")
    return path.exists() and is_running(int(path.read_text()))


def comes(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Whether a condition is met before a time that nothing here takes."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def ends_within(pid: int, limit_s: float = LIMIT_S) -> bool:
    return comes(lambda: not is_running(pid), limit_s)


def child_of(keeper: int) -> int:
    """What a keeper has started, once it has."""
    children = Path(f"/proc/{keeper}/task/{keeper}/children")
    comes(lambda: bool(children.read_text()))
    return int(children.read_text())


def worker_of(reward: IsolatedReward) -> int:
    """The worker of a reward that has one, which its keeper has started."""
    (one,) = reward._workers.children
    return child_of(one._popen.pid)
