"""Scoring on an event loop, in this process: how many calls are in progress at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from millrace.rewards.reward_worker import score_concurrently


class FakeChannel:
    """Requests of one prompt, and the replies to them."""

    def __init__(self, *completions: str) -> None:
        self._completions = completions
        self.replies: dict[int, list[Any]] = {}

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        rows = [("the prompt", "the answer", {"plain": {}})]
        yield 1, json.dumps({"prompts": rows}).encode()
        for id, completion in enumerate(self._completions, 2):
            yield id, json.dumps((0, completion)).encode()

    def reply(self, id: int, body: bytes) -> None:
        self.replies[id] = json.loads(body)


def replies(function, *completions: str, timeout_s: float = 1e6) -> list[list[Any]]:
    channel = FakeChannel(*completions)
    asyncio.run(score_concurrently(channel, function, timeout_s=timeout_s))
    return [channel.replies[id] for id in sorted(channel.replies)]


def test_two_hundred_calls_wait_at_the_same_time():
    """Each call waits until all have begun: one after another would never end."""
    begun, everyone = [], asyncio.Event()

    async def meet(prompt, completion, answer, row):
        begun.append(completion)
        if len(begun) == 200:
            everyone.set()
        await everyone.wait()
        return float(completion)

    found = replies(meet, *map(str, range(200)))
    assert found == [["score", float(number), "", {}] for number in range(200)]


def test_a_call_fails_alone():
    """It raises, leaves Python, cancels itself, or ends too late, even if it ignores that it is cancelled."""
    ignores = []

    async def score(prompt, completion, answer, row):
        match completion:
            case "raise":
                raise ValueError("no")
            case "leave":
                raise SystemExit(3)
            case "cancel":
                raise asyncio.CancelledError
            case "hang":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    ignores.append(completion)
                    await asyncio.Event().wait()
        return 1.0

    good, *bad, late = replies(score, "good", "raise", "leave", "cancel", "hang", timeout_s=0.05)
    assert good == ["score", 1.0, "", {}] and late == ["failed", 0.0, "took longer than 0.05 s", {}]
    reasons = ["ValueError: no", "SystemExit: 3", "CancelledError"]
    for (kind, _, reason, _), expected in zip(bad, reasons, strict=True):
        assert kind == "failed" and expected in reason
    assert ignores == ["hang"]
