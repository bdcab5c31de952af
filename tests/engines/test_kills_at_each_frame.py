"""Either worker dies before, within and after each frame of a transfer: no bit changes."""

from __future__ import annotations

import asyncio
import copy
import socket

import pytest

from millrace.engines.prefill_decode_engine import RoleCounts
from millrace.engines.prefill_decode_handle import ROLE_COMMANDS, Role
from millrace.engines.wire import Channel
from millrace.models.load import Model
from millrace.types import Completion, SamplingParams
from tests.engines.mortal_channel import Mortal
from tests.engines.role_workers import KEY, Killed, Threads, over, within
from tests.inference.fresh import paged
from tests.twins.test_deterministic import deterministic_model

PROMPT = tuple(range(1, 23))
GROUP = [SamplingParams(max_tokens=4, seed=seed) for seed in range(2)]


class Deaths:
    """The first worker of a role is killed at one of the points that it passes; 0 is none."""

    def __init__(self, role: Role, number: int) -> None:
        self._role, self.number = role, number
        self.passed, self._is_given = list[str](), False

    def connect(self, name: str, theirs: socket.socket) -> Channel:
        if not name.startswith(self._role) or self._is_given:
            return Channel(theirs, KEY, ROLE_COMMANDS)
        self._is_given = True
        return Mortal(theirs, KEY, self)

    def is_at(self, point: str) -> bool:
        self.passed.append(point)
        return len(self.passed) == self.number

    def die(self) -> None:
        raise Killed


def served(model: Model, deaths: Deaths) -> tuple[list[Completion], RoleCounts]:
    threads = Threads(model)
    threads.channels = deaths.connect

    async def run() -> tuple[list[Completion], RoleCounts]:
        async with over(threads) as engine:
            streams = engine.submit_siblings(PROMPT, GROUP)
            found = [await stream.completion() for stream in streams]
            while engine._transfers or (deaths.number and not sum(engine.counts.lost.values())):
                await asyncio.sleep(0)
            assert not engine._live
            return found, engine.counts

    found: tuple[list[Completion], RoleCounts] = within(run())
    return found


def points(model: Model, role: Role) -> list[str]:
    """All points that a worker passes when it lives."""
    deaths = Deaths(role, 0)
    _, counts = served(model, deaths)
    assert (counts.complete, sum(counts.lost.values())) == (1, 0)
    return deaths.passed


@pytest.fixture(scope="module")
def model() -> Model:
    return deterministic_model("qwen3").requires_grad_(False)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_killed_at_any_point_of_any_frame_changes_no_bit(model: Model, role: Role) -> None:
    wanted = paged(copy.deepcopy(model)).generate([PROMPT] * len(GROUP), GROUP)
    passed = points(model, role)
    kinds = {"prefill": ["prefill", "pieces", "prefilled"], "decode": ["submit", "imported", "pieces"]}[role]
    assert {point.split()[1] for point in passed} == set(kinds)
    for number, point in enumerate(passed, 1):
        deaths = Deaths(role, number)
        found, counts = served(model, deaths)
        assert deaths.passed[-1] == point
        assert counts.lost[role] == 1, f"death {point} ({number})"
        for one, other in zip(found, wanted, strict=True):
            assert one.token_ids == other.token_ids, f"death {point} ({number})"
            assert one.logprobs.tobytes() == other.logprobs.tobytes(), f"death {point} ({number})"
            assert one.finish_reason == other.finish_reason
