"""Open-loop load on something that serves: requests at their times, and the seconds of their tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
from millrace.planner.durations import lognormal
from millrace.planner.placement import Objective
from millrace.simulation.arrivals import ServingRequest, at_rate, random_requests
from millrace.simulation.serving import GOOD_FRACTION, ServedTimes, attainment
from millrace.types import SamplingParams

# Yields the number of new tokens as they arrive.
Send = Callable[[ServingRequest], AsyncIterator[int]]
ARRIVALS = ("poisson", "bursty", "trace")
LIMIT_S = 900.0
# Rates are tried in these steps, as far as this factor from the first one.
STEP, MAX_FACTOR = math.sqrt(2), 16.0


def requests(arrivals: str, num: int, *, longest: int, vocab_size: int, seed: int) -> list[ServingRequest]:
    """Make requests with 200 tokens of prompt and 20 of answer in the median; `at_rate` gives them a rate.

    `trace` is a made one: quiet and busy phases of eight requests each, and in busy ones long prompts.
    """
    lengths = lognormal(200, 0.8), lognormal(20, 0.6)
    burstiness = {"poisson": 1.0, "bursty": 3.0, "trace": 1.0}[arrivals]
    found = random_requests(
        num, rate=1.0, burstiness=burstiness, prompt=lengths[0], output=lengths[1], seed=seed
    )
    numbers, now_s, before_s, made = np.random.default_rng(seed), 0.0, 0.0, []
    for one in found:
        is_busy = arrivals == "trace" and one.number // 8 % 2
        now_s += (one.arrival_s - before_s) * (0.25 if is_busy else 1.0)
        before_s = one.arrival_s
        num_prompt = min(longest * 3 // 4, len(one.prompt) * (2 if is_busy else 1))
        prompt = tuple(numbers.integers(1, vocab_size, num_prompt).tolist())
        made.append(
            replace(one, arrival_s=now_s, prompt=prompt, num_output=min(longest // 4, one.num_output))
        )
    return made


def send_to(engine: PrefillDecodeEngine) -> Send:
    """Return how requests are sent to workers of ours."""

    async def send(request: ServingRequest) -> AsyncIterator[int]:
        stop = SamplingParams(max_tokens=request.num_output, seed=request.number, stop_token_ids=())
        (stream,) = engine.submit_siblings(request.prompt, [stop])
        async for piece in stream:
            yield len(piece.token_ids)
        await stream.completion()

    return send


async def serve(send: Send, wanted: Sequence[ServingRequest]) -> list[ServedTimes]:
    """Send requests at their times, whether or not others have ended; RuntimeError if tokens are missing."""
    begin_s = time.monotonic()

    async def one(request: ServingRequest) -> ServedTimes:
        times = ServedTimes(request)
        await asyncio.sleep(begin_s + request.arrival_s - time.monotonic())
        async for num in send(request):
            for _ in range(num):
                times.add(time.monotonic() - begin_s)
        if times.num_tokens != request.num_output:
            raise RuntimeError(f"{times.num_tokens} tokens came of {request.num_output}")
        return times

    async with asyncio.timeout(LIMIT_S):
        return list(await asyncio.gather(*map(one, wanted)))


async def goodput(
    run: Callable[[Sequence[ServingRequest]], Awaitable[list[ServedTimes]]],
    wanted: Sequence[ServingRequest],
    objective: Objective,
    rate: float,
) -> float:
    """Return the highest rate of those tried at which GOOD_FRACTION of the requests meet the objective.

    They are `rate` times powers of STEP, up from the first good one to the first bad one; 0 if there is none.
    """

    async def is_good(tried: float) -> bool:
        return attainment(await run(at_rate(wanted, tried)), objective) >= GOOD_FRACTION

    lowest = rate / MAX_FACTOR
    good = await is_good(rate)
    if not good:
        while not good and rate > lowest:
            rate /= STEP
            good = await is_good(rate)
        return rate if good else 0.0
    highest = rate * MAX_FACTOR
    while rate < highest and await is_good(rate * STEP):
        rate *= STEP
    return rate
