"""Requests of a serving workload and when they arrive: Poisson, bursty, or from a trace. No torch."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import PlanError
from millrace.observability.plain import plain_text
from millrace.planner.durations import Quantile

# What reading a file of another form raises.
NOT_A_TRACE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, csv.Error)
MAX_TOKENS = 1 << 20
# Tokens of a block of Mooncake's traces.
HASHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """A request that arrives at a second of the clock: its prompt, and how many tokens it generates.

    Prompts with an equal beginning share it in the prefix cache.
    """

    number: int
    arrival_s: float
    prompt: tuple[int, ...]
    num_output: int


def random_requests(
    num: int, *, rate: float, burstiness: float, prompt: Quantile, output: Quantile, seed: int
) -> list[ServingRequest]:
    """Return requests whose times between arrivals are Gamma distributed, with `rate` of them a second.

    `burstiness` is the coefficient of variation of these times: 1 is a Poisson process, more is bursty.
    Prompts share nothing; lengths are rounded up to one token.

    Raises:
        PlanError: there is no request, the rate is not above 0, or the burstiness is outside [0.01, 100].
    """
    if num < 1 or not 0 < rate < math.inf or not 0.01 <= burstiness <= 100:
        raise PlanError(
            f"{num} requests at a rate of {rate:g}/s with burstiness {burstiness:g} cannot arrive; the "
            "first two must be above 0, and burstiness between 0.01 and 100"
        )
    numbers = np.random.default_rng(seed)
    shape = burstiness**-2
    time_N = np.cumsum(numbers.gamma(shape, 1 / (rate * shape), num))
    level_NK = numbers.random((num, 2))
    return [
        ServingRequest(
            number,
            float(time_s),
            _own_tokens(number, _length(prompt(float(level_K[0])))),
            _length(output(float(level_K[1]))),
        )
        for number, (time_s, level_K) in enumerate(zip(time_N, level_NK, strict=True))
    ]


def _length(value: float) -> int:
    return round(min(MAX_TOKENS, max(1, value)))


def _own_tokens(number: int, length: int) -> tuple[int, ...]:
    """A prompt whose first block no other one has."""
    return (number, *range(1, length))


def at_rate(requests: Sequence[ServingRequest], rate: float) -> list[ServingRequest]:
    """Return the requests with their arrivals stretched, so that `rate` of them arrive a second."""
    factor = mean_rate(requests) / rate
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]


def mean_rate(requests: Sequence[ServingRequest]) -> float:
    """Return arrivals per second; PlanError if all requests arrive at second 0."""
    last_s = max(request.arrival_s for request in requests)
    if last_s <= 0:
        raise PlanError("all requests arrive at the same time, so they have no rate; give a longer trace")
    return len(requests) / last_s


def read_arrivals(path: Path, *, most: int) -> list[ServingRequest]:
    """Read at most so many requests of a trace.

    Either JSON lines with `timestamp` (milliseconds), `input_length`, `output_length` and optionally
    `hash_ids`, of blocks of 512 tokens, as of Mooncake, or CSV with the columns `TIMESTAMP`, `ContextTokens`
    and `GeneratedTokens`, as of Azure.

    Raises:
        PlanError: the file cannot be read, has another form, or fewer than two requests.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, filter(str.strip, file))
            found = list(_requests(rows, path.suffix == ".csv", most))
    except OSError as error:
        raise PlanError(f"--trace {path}: {error.strerror}") from None
    except NOT_A_TRACE as error:
        reason = plain_text(f"{type(error).__name__}: {error}", 200)
        raise PlanError(
            f"--trace {path} is no trace ({reason}); give JSON lines with timestamp, input_length and "
            "output_length, or CSV with TIMESTAMP, ContextTokens and GeneratedTokens"
        ) from None
    if len(found) < 2:
        raise PlanError(f"--trace {path} has {len(found)} requests; two at least are needed")
    found.sort(key=lambda request: request.arrival_s)
    first_s = found[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in found]


def _requests(rows: Iterator[Any], is_csv: bool, most: int) -> Iterator[ServingRequest]:
    for number, row in enumerate(rows):
        if number == most:
            return
        if is_csv:
            # Seven digits of a second are one too many.
            time_s = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
            num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        else:
            time_s = float(row["timestamp"]) / 1000
            num_prompt, num_output = int(row["input_length"]), int(row["output_length"])
        if not (math.isfinite(time_s) and 1 <= num_prompt <= MAX_TOKENS and 1 <= num_output <= MAX_TOKENS):
            raise ValueError(f"row {number + 1} has {num_prompt} and {num_output} tokens at {time_s} s")
        hashes = [int(block) for block in row.get("hash_ids") or ()]
        prompt = _own_tokens(number, num_prompt)
        if hashes:
            tokens = [block * HASHED_TOKENS + place for block in hashes for place in range(HASHED_TOKENS)]
            prompt = tuple(token % (1 << 30) for token in tokens[:num_prompt])
            prompt += tuple(range(num_prompt - len(prompt)))
        yield ServingRequest(number, time_s, prompt, num_output)
