"""What the tests of isolated rewards share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from millrace.rewards.isolated import IsolatedReward
from millrace.types import Outcome, Prompt


def prompts(num: int, row: dict[str, Any] | None = None) -> list[Prompt]:
    return [Prompt("train:0", (1,), "the prompt", "the answer", row or {})] * num


def score(reward: IsolatedReward, *completions: str) -> list[Outcome]:
    return reward.score(prompts(len(completions)), completions)


def calls() -> list[str]:
    return Path("calls.txt").read_text().splitlines()


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a corpse nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends_within(pid: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)
