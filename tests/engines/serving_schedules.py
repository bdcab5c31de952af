"""Random faults of prefill and decode workers: a schedule is a function of its number, but for timing."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from millrace.engines.kv_network import KvNetwork
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine, RoleCounts
from millrace.engines.wire import Frame
from millrace.inference.async_engine import EngineClosed, Stream
from millrace.models.load import Model, named_weights
from millrace.types import Completion, SamplingParams
from tests.engines.role_workers import Threads, over, within
from tests.inference.fresh import paged
from tests.twins.test_deterministic import deterministic_model

TEXT = tuple(range(1, 40))
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": ("1", "23")},
    {"top_k": 5, "top_p": 0.9, "min_tokens": 4},
    {"repetition_penalty": 1.3, "stop_token_ids": (0, 3, 7)},
    {"temperature": 0.0},
)
# Below the number of deaths in a row after which no worker is started any more.
MOST_DEATHS = 3


@cache
def served_model() -> Model:
    return deterministic_model("qwen3").requires_grad_(False)


@dataclass(frozen=True)
class Family:
    """Samples of one prompt; `abort` of them are aborted after some turns of the event loop."""

    prompt: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    abort: int
    wait: int


class Faults:
    """What happens to the reports of workers."""

    def __init__(self, numbers: random.Random) -> None:
        self._numbers = numbers
        self._death, self._spoiled = numbers.choice([0, 0.05, 0.3]), numbers.choice([0, 0.5])
        self.num_deaths = self.num_spoiled = 0

    def __call__(self, name: str, frame: Frame) -> Frame | None:
        if frame.kind in ("ready", "weights_loaded"):
            return frame
        if self.num_deaths < MOST_DEATHS and self._numbers.random() < self._death:
            self.num_deaths += 1
            return None
        if (
            frame.kind == "prefilled"
            and frame.metadata["manifest"]
            and self._numbers.random() < self._spoiled
        ):
            self.num_spoiled += 1
            return replace(frame, metadata={**frame.metadata, "manifest": self._spoil(frame)})
        return frame

    def _spoil(self, frame: Frame) -> dict[str, object]:
        manifest = dict(frame.metadata["manifest"])
        match self._numbers.randrange(3):
            case 0:
                manifest["version"] += 1
            case 1:
                manifest["checksums"] = [*manifest["checksums"][:-1], "00" * 16]
            case _:
                manifest["digests"] = ["ff" * 16, *manifest["digests"][1:]]
        return manifest


def families(numbers: random.Random) -> list[Family]:
    made = []
    for _ in range(numbers.randint(1, 4)):
        first, kind = numbers.randrange(8), numbers.choice(KINDS)
        prompt, size = TEXT[first : first + numbers.randint(2, 30)], numbers.randint(1, 3)
        least = kind.get("min_tokens", 1)
        params = tuple(
            SamplingParams(max_tokens=numbers.randint(least, 8), seed=numbers.randrange(99), **kind)
            for _ in range(size)
        )
        made.append(Family(prompt, params, numbers.choice([0, 0, 0, size]), numbers.randrange(200)))
    return made


def run_schedule(number: int, *, network: bool = False) -> tuple[RoleCounts, Faults]:
    """Serve some prompts under faults; AssertionError with the number if a bit is not that of one engine.

    Blocks travel by shared memory, or by a `network`.
    """
    numbers = random.Random(number)
    model, threads = served_model(), Threads(served_model())
    asked, faults = families(numbers), Faults(numbers)
    threads.receives = faults
    if network:
        threads.networks = lambda: KvNetwork("127.0.0.1")
    num_updates, workers = numbers.choice([0, 0, 1, 2]), (numbers.randint(1, 2), numbers.randint(1, 2))

    async def update(engine: PrefillDecodeEngine) -> None:
        """Replace the weights by equal ones, so that each token stays what it is."""
        for version in range(1, num_updates + 1):
            await turns(numbers.randrange(300))
            # The memory has the weights then, for the workers that replace the lost ones.
            with suppress(EngineClosed):
                await engine.update_weights(named_weights(model), version)

    async def one(engine: PrefillDecodeEngine, family: Family) -> list[Completion | EngineClosed]:
        try:
            streams = engine.submit_siblings(family.prompt, family.params)
        except EngineClosed as error:
            return [error] * len(family.params)
        if family.abort:
            await turns(family.wait)
            await asyncio.gather(
                *(engine.abort(stream.id) for stream in streams[: family.abort]), return_exceptions=True
            )
        return [await streamed(stream) for stream in streams]

    async def run() -> tuple[list[list[Completion | EngineClosed]], RoleCounts]:
        async with over(threads, num_prefill=workers[0], num_decode=workers[1]) as engine:
            updating = asyncio.ensure_future(update(engine))
            found = await asyncio.gather(*(one(engine, family) for family in asked))
            await updating
            assert not engine._live, f"schedule {number}: samples are left"
            while engine._transfers:  # of aborted samples
                await asyncio.sleep(0)
            assert engine.version == num_updates
            return found, engine.counts

    found, counts = within(run())
    for family, completions in zip(asked, found, strict=True):
        twin = paged(model).generate([family.prompt] * len(family.params), family.params)
        for wanted, completion in zip(twin, completions, strict=True):
            if isinstance(completion, EngineClosed):
                # Both workers of two may be lost at once.
                assert faults.num_deaths >= min(sum(workers), MOST_DEATHS)
                assert "no worker is left" in str(completion)
                continue
            check(number, completion, wanted, may_abort=bool(family.abort))
    assert sum(counts.lost.values()) <= faults.num_deaths
    return counts, faults


def check(number: int, found: Completion, wanted: Completion, *, may_abort: bool) -> None:
    """Compare the bits of a completion, or of the beginning of one that was aborted."""
    size = len(found.token_ids)
    if found.finish_reason == "abort" and may_abort:
        wanted = replace(
            wanted,
            token_ids=wanted.token_ids[:size],
            logprobs=wanted.logprobs[:size],
            versions=wanted.versions[:size],
            support=None,
        )
    else:
        assert found.finish_reason == wanted.finish_reason, f"schedule {number}: another end"
        assert found.text == wanted.text, f"schedule {number}: another text"
    assert found.token_ids == wanted.token_ids, f"schedule {number}: other tokens"
    same = found.logprobs.tobytes() == wanted.logprobs.tobytes()
    assert same, f"schedule {number}: other log-probabilities"
    assert len(found.versions) == size, f"schedule {number}: {len(found.versions)} versions"
    assert (found.versions[1:] >= found.versions[:-1]).all(), f"schedule {number}: a version went back"


async def turns(num: int) -> None:
    """Let the event loop do other things so many times."""
    for _ in range(num):
        await asyncio.sleep(0)


async def streamed(stream: Stream) -> Completion | EngineClosed:
    tokens: list[int] = []
    try:
        async for piece in stream:
            tokens += piece.token_ids
        found = await stream.completion()
    except EngineClosed as error:
        return error
    assert found.token_ids == tuple(tokens)
    return found
