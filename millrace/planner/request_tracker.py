"""Requests of a serving system as `placement.place` needs them: where each is, and since when. No torch."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from millrace.planner.division import RecentRequests, choose_division
from millrace.planner.length_model import LengthForecast, LengthKey, LengthModel
from millrace.planner.placement import (
    Here,
    NewRequest,
    Place,
    RequestState,
    RouteUsed,
    ServingModel,
    WorkerState,
    place,
)

# Prompts whose lengths are remembered each by itself.
MAX_PROMPTS = 10_000
# The rate of prompt tokens is that of so many times the target of the first token.
RATE_TARGETS = 20.0


# Of the expected length of a request, in the workload.
QUANTILES = (1 / 6, 1 / 2, 5 / 6)
# The workload is that of so many of the last requests; the workers are divided anew at each eighth.
LEAST_WINDOW, WINDOW_PER_WORKER = 64, 8
DIVIDE_EVERY = 8


class WorkerFacts(NamedTuple):
    """What a worker reports: tokens of its KV cache, drift of its steps, and whether it can send."""

    name: str
    capacity: int
    drift: float = 1.0
    can_send: bool = True


class ExpectedLength:
    """Expected tokens that a request has left; the forecast is asked again each time they double."""

    def __init__(self, forecast: LengthForecast) -> None:
        self._forecast, self._given, self._mean = forecast, -1, 0.0

    def left(self, num_tokens: int) -> float:
        """Return the expected further tokens after so many, at least 1."""
        given = 1 << num_tokens.bit_length() >> 1
        if given != self._given:
            self._given, self._mean = given, self._forecast.mean(given=float(given))
        return max(1.0, self._mean - num_tokens)

    def quantiles(self) -> tuple[float, ...]:
        """Return the lengths at QUANTILES."""
        return tuple(max(1.0, self._forecast.quantile(one)) for one in QUANTILES)


class Arrival(NamedTuple):
    """A request that arrived: when, tokens of its prompt, and quantiles of its expected length."""

    time_s: float
    num_prompt: int
    output_Q: tuple[float, ...]


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A sample: `worker` generates its tokens, `prefill` computes its prompt, if another one does.

    `prompt_tokens` are those to compute before its first token here: 0 for all but one sample of a prompt.
    """

    key: LengthKey
    max_tokens: int
    length: ExpectedLength
    arrived_s: float
    worker: str
    prefill: str | None
    prompt_tokens: int
    num_tokens: int = 0
    first_s: float = math.nan

    def at(self, worker: str, now_s: float) -> RequestState | None:
        """Return the request as a worker has it; None if it is none of its."""
        is_waiting = self.prompt_tokens > 0
        computes = is_waiting and worker == (self.prefill or self.worker)
        if worker != self.worker and not computes:
            return None
        ttft_s = (self.first_s if self.num_tokens else now_s) - self.arrived_s
        return RequestState(
            waiting=self.prompt_tokens if computes else 0,
            context=self.key.num_prompt_tokens + self.num_tokens,
            left=self.length.left(self.num_tokens) if worker == self.worker else 0.0,
            ttft_s=ttft_s,
            num_tokens=self.num_tokens,
            decode_s=now_s - self.first_s if self.num_tokens else 0.0,
        )


@dataclass(slots=True)
class _Rate:
    """Prompt tokens a second that a worker was given, as an exponentially weighted mean."""

    tokens: float = 0.0
    at_s: float = 0.0

    def add(self, num_tokens: int, now_s: float, horizon_s: float) -> None:
        self.tokens = self.tokens * math.exp((self.at_s - now_s) / horizon_s) + num_tokens
        self.at_s = now_s

    def value(self, now_s: float, horizon_s: float) -> float:
        return self.tokens * math.exp((self.at_s - now_s) / horizon_s) / horizon_s


@dataclass(slots=True, eq=False)
class RequestTracker:
    """Follows the requests of a system and places new ones by the cost model; times are of one clock.

    The expected length of a request is that of its prompt where it is known, else of prompts of similar
    length.
    """

    model: ServingModel
    lengths: LengthModel = field(default_factory=lambda: LengthModel(max_prompts=MAX_PROMPTS))
    requests: dict[str, TrackedRequest] = field(default_factory=dict)
    previous: RouteUsed | None = None
    num_prefill: int = 0
    _arrivals: deque[Arrival] = field(default_factory=deque)
    _num_placed: int = 0
    _rates: dict[str, _Rate] = field(default_factory=dict)

    def place(
        self,
        ids: Sequence[str],
        prompt: Sequence[int],
        max_tokens: Sequence[int],
        workers: Sequence[WorkerFacts],
        now_s: float,
        *,
        can_split: bool = True,
    ) -> Place:
        """Place the samples of one prompt, and follow them from now on.

        Samples that are followed already, as after the loss of a worker, keep their times.

        Raises:
            PlanError: there is no worker.
        """
        old = {id: self.requests.pop(id) for id in ids if id in self.requests}
        key = LengthKey(len(prompt), prompt_id(prompt))
        lengths = [ExpectedLength(self.lengths.forecast(key, max_tokens=most)) for most in max_tokens]
        num_known = max((one.num_tokens for one in old.values()), default=0)
        request = NewRequest(
            len(prompt) + num_known,
            sum(length.left(0) for length in lengths) / len(lengths),
            len(ids),
            can_split,
        )
        if not old:
            self._add_arrivals(len(prompt), lengths, now_s, len(workers))
        states = self.states(workers, now_s)
        found = place(request, states, self.model, self.num_prefill, self.previous)
        self.previous = found.route
        first, prefill = (
            (found.place.engine, None)
            if isinstance(found.place, Here)
            else (found.place.decode, found.place.prefill)
        )
        rate = self._rates.setdefault(prefill or first, _Rate(at_s=now_s))
        rate.add(request.num_prompt, now_s, self._horizon_s)
        for place_in_group, (id, most, length) in enumerate(zip(ids, max_tokens, lengths, strict=True)):
            waiting = request.num_prompt if place_in_group == 0 else 0
            one = TrackedRequest(key, most, length, now_s, first, prefill, waiting)
            if (before := old.get(id)) is not None:
                one.arrived_s, one.first_s = before.arrived_s, before.first_s
                one.num_tokens = before.num_tokens
            self.requests[id] = one
        return found.place

    def _add_arrivals(
        self, num_prompt: int, lengths: Sequence[ExpectedLength], now_s: float, num_workers: int
    ) -> None:
        """Note new samples, and divide the workers anew from time to time."""
        for place_in_group, length in enumerate(lengths):
            # The other samples of a group find its prompt in the cache.
            self._arrivals.append(Arrival(now_s, 1 if place_in_group else num_prompt, length.quantiles()))
        most = max(LEAST_WINDOW, WINDOW_PER_WORKER * num_workers)
        while len(self._arrivals) > most:
            self._arrivals.popleft()
        self._num_placed += 1
        if self._num_placed % DIVIDE_EVERY or len(self._arrivals) < LEAST_WINDOW / 4:
            return
        self.num_prefill = choose_division(self.workload(), num_workers, self.model, self.num_prefill)

    def workload(self) -> RecentRequests:
        """Return rate and lengths of the last requests, of which there must be two at least."""
        gap_N = np.diff([one.time_s for one in self._arrivals])
        mean_s = max(float(gap_N.mean()), 1e-9)
        return RecentRequests(
            rate=1 / mean_s,
            variation=float(gap_N.var()) / mean_s**2,
            prompt_N=np.array([one.num_prompt for one in self._arrivals], float),
            output_NQ=np.array([one.output_Q for one in self._arrivals], float),
        )

    def states(self, workers: Sequence[WorkerFacts], now_s: float) -> list[WorkerState]:
        """Return what each worker has to do."""
        found: dict[str, list[RequestState]] = {worker.name: [] for worker in workers}
        for one in self.requests.values():
            for name in {one.worker, one.prefill or one.worker}:
                if name in found and (state := one.at(name, now_s)) is not None:
                    found[name].append(state)
        return [
            WorkerState(
                name=worker.name,
                requests=found[worker.name],
                free_tokens=worker.capacity - sum(one.context + one.left for one in found[worker.name]),
                prompt_rate=self._rates.get(worker.name, _Rate()).value(now_s, self._horizon_s),
                drift=worker.drift,
                can_send=worker.can_send,
            )
            for worker in workers
        ]

    @property
    def _horizon_s(self) -> float:
        return RATE_TARGETS * self.model.objective.ttft_s

    def sampled(self, id: str, num_tokens: int, now_s: float) -> None:
        """Note further tokens of a request; one that is not followed is ignored."""
        if (one := self.requests.get(id)) is None or not num_tokens:
            return
        if not one.num_tokens:
            one.first_s = now_s
        one.num_tokens += num_tokens
        one.prompt_tokens = 0

    def moved(self, ids: Iterable[str], worker: str) -> None:
        """Note that another worker than was planned generates the tokens of these requests."""
        for id in ids:
            if (one := self.requests.get(id)) is not None:
                one.worker = worker

    def ended(self, id: str, *, truncated: bool | None) -> None:
        """Forget a request, and learn its length unless it was aborted (`truncated` is None)."""
        if (one := self.requests.pop(id, None)) is None or truncated is None or not one.num_tokens:
            return
        most = max(one.max_tokens, one.num_tokens)
        self.lengths.observe(one.key, one.num_tokens, max_tokens=most, truncated=truncated)


def prompt_id(prompt: Sequence[int]) -> str:
    """Return a short name of a prompt: equal prompts have equal ones."""
    return hashlib.blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=12).hexdigest()
