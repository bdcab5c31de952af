"""Requests of a serving system as `placement.place` needs them: where each is, and since when. No torch."""

from __future__ import annotations

import hashlib
import math
from array import array
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
    RequestStates,
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
    """Expected tokens of a request, by how many it has: its forecast given 0, 1, 2, 4, ... tokens."""

    def __init__(self, forecast: LengthForecast) -> None:
        octaves = np.exp2(np.arange(forecast.max_tokens.bit_length()))
        self._mean_G = forecast.means(np.append(0.0, octaves)).tolist()
        self.quantile_Q = tuple(max(1.0, forecast.quantile(one)) for one in QUANTILES)

    def mean(self, num_tokens: int) -> float:
        """Return the expected length of a request that has so many tokens."""
        found: float = self._mean_G[min(num_tokens.bit_length(), len(self._mean_G) - 1)]
        return found


class Arrival(NamedTuple):
    """A request that arrived: when, tokens of its prompt, and quantiles of its expected length."""

    time_s: float
    num_prompt: int
    output_Q: tuple[float, ...]


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A sample; the rest of its state is a row of a `_Table`."""

    key: LengthKey
    max_tokens: int
    length: ExpectedLength
    row: int = -1


class _Table:
    """States of requests by columns, one row for each, without gaps: arithmetic takes all at once.

    `worker` generates the tokens and `prefill` computes the prompt; both are numbers of names, and equal if
    one worker does both. `waiting` are the prompt tokens to compute before the first token: 0 for all but one
    sample of a prompt. `expected` is the length, given `num_tokens`.
    """

    def __init__(self) -> None:
        self.worker, self.prefill = array("d"), array("d")
        self.waiting, self.num_prompt = array("d"), array("d")
        self.num_tokens, self.expected = array("d"), array("d")
        self.arrived_s, self.first_s = array("d"), array("d")
        self._requests: list[TrackedRequest] = []

    @property
    def _columns(self) -> tuple[array[float], ...]:
        states = self.waiting, self.num_prompt, self.num_tokens, self.expected
        return (self.worker, self.prefill, *states, self.arrived_s, self.first_s)

    def add(self, request: TrackedRequest) -> int:
        """Append a row of zeros; return its number."""
        for column in self._columns:
            column.append(0)
        request.row = len(self._requests)
        self._requests.append(request)
        return request.row

    def remove(self, request: TrackedRequest) -> None:
        """Fill the row of a request with the last one."""
        last = self._requests.pop()
        for column in self._columns:
            state = column.pop()
            if last is not request:
                column[request.row] = state
        if last is not request:
            self._requests[request.row], last.row = last, request.row


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
    _table: _Table = field(default_factory=_Table)
    _numbers: dict[str, int] = field(default_factory=dict)

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
        table = self._table
        old = {id: self._forget(self.requests.pop(id)) for id in ids if id in self.requests}
        key = LengthKey(len(prompt), prompt_id(prompt))
        forecasts = {most: self.lengths.forecast(key, max_tokens=most) for most in set(max_tokens)}
        length_of = {most: ExpectedLength(forecast) for most, forecast in forecasts.items()}
        lengths = [length_of[most] for most in max_tokens]
        num_known = max((num_tokens for num_tokens, _, _ in old.values()), default=0)
        request = NewRequest(
            len(prompt) + num_known,
            sum(max(1.0, length.mean(0)) for length in lengths) / len(lengths),
            len(ids),
            can_split,
        )
        if not old:
            self._add_arrivals(len(prompt), lengths, now_s, len(workers))
        rows = self.table([worker.name for worker in workers], now_s)
        states = self._states(workers, rows, now_s)
        found = place(request, states, rows, self.model, self.num_prefill, self.previous)
        self.previous = found.route
        first, prefill = (
            (found.place.engine, found.place.engine)
            if isinstance(found.place, Here)
            else (found.place.decode, found.place.prefill)
        )
        rate = self._rates.setdefault(prefill, _Rate(at_s=now_s))
        rate.add(request.num_prompt, now_s, self._horizon_s)
        for place_in_group, (id, most, length) in enumerate(zip(ids, max_tokens, lengths, strict=True)):
            num_tokens, arrived_s, first_s = old.get(id, (0, now_s, math.nan))
            self.requests[id] = one = TrackedRequest(key, most, length)
            row = table.add(one)
            table.worker[row], table.prefill[row] = self._number(first), self._number(prefill)
            table.waiting[row] = 0 if place_in_group else request.num_prompt
            table.num_prompt[row], table.num_tokens[row] = len(prompt), num_tokens
            table.expected[row] = length.mean(num_tokens)
            table.arrived_s[row], table.first_s[row] = arrived_s, first_s
        return found.place

    def _forget(self, one: TrackedRequest) -> tuple[int, float, float]:
        """Return the tokens of a request, when it arrived and when its first token did."""
        table, row = self._table, one.row
        state = int(table.num_tokens[row]), table.arrived_s[row], table.first_s[row]
        table.remove(one)
        return state

    def _number(self, worker: str) -> int:
        return self._numbers.setdefault(worker, len(self._numbers))

    def _add_arrivals(
        self, num_prompt: int, lengths: Sequence[ExpectedLength], now_s: float, num_workers: int
    ) -> None:
        """Note new samples, and divide the workers anew from time to time."""
        for place_in_group, length in enumerate(lengths):
            # The other samples of a group find its prompt in the cache.
            self._arrivals.append(Arrival(now_s, 1 if place_in_group else num_prompt, length.quantile_Q))
        most = max(LEAST_WINDOW, WINDOW_PER_WORKER * num_workers)
        while len(self._arrivals) > most:
            self._arrivals.popleft()
        self._num_placed += 1
        if self._num_placed % DIVIDE_EVERY or len(self._arrivals) < LEAST_WINDOW / 4:
            return
        if (objective := self.model.objective) is not None:
            recent = self.workload()
            self.num_prefill = choose_division(recent, num_workers, self.model, objective, self.num_prefill)

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

    def table(self, workers: Sequence[str], now_s: float) -> RequestStates:
        """Return the requests that these workers have."""
        of, place_of = self._table, np.full(len(self._numbers), -1)
        for place_of_worker, name in enumerate(workers):
            if name in self._numbers:
                place_of[self._numbers[name]] = place_of_worker
        worker_N, prefill_N = place_of[np.array(of.worker, int)], place_of[np.array(of.prefill, int)]
        num_tokens_N, waiting_N = np.array(of.num_tokens), np.array(of.waiting)
        first_N, has_first_N = np.array(of.first_s), num_tokens_N > 0
        context_N = np.array(of.num_prompt) + num_tokens_N
        left_N = np.maximum(1.0, np.array(of.expected) - num_tokens_N)
        ttft_N = np.where(has_first_N, first_N, now_s) - np.array(of.arrived_s)
        decode_N = np.where(has_first_N, now_s - first_N, 0.0)
        is_whole_N = np.array(of.worker) == np.array(of.prefill)
        # The worker that generates, then the one that still computes the prompt, if that is another one.
        here_N = worker_N >= 0
        there_N = (prefill_N >= 0) & ~is_whole_N & (waiting_N > 0)
        none = np.zeros(int(there_N.sum()))

        def both(column_N: np.ndarray) -> np.ndarray:
            return np.concatenate((column_N[here_N], column_N[there_N]))

        return RequestStates(
            worker_R=np.concatenate((worker_N[here_N], prefill_N[there_N])),
            waiting_R=np.concatenate(((waiting_N * is_whole_N)[here_N], waiting_N[there_N])),
            context_R=both(context_N),
            left_R=np.concatenate((left_N[here_N], none)),
            ttft_R=both(ttft_N),
            num_tokens_R=both(num_tokens_N),
            decode_R=both(decode_N),
        )

    def _states(
        self, workers: Sequence[WorkerFacts], table: RequestStates, now_s: float
    ) -> list[WorkerState]:
        used_W = np.bincount(table.worker_R, table.context_R + table.left_R, len(workers))
        return [
            WorkerState(
                name=worker.name,
                free_tokens=worker.capacity - used,
                prompt_rate=self._rates.get(worker.name, _Rate()).value(now_s, self._horizon_s),
                drift=worker.drift,
                can_send=worker.can_send,
            )
            for worker, used in zip(workers, used_W.tolist(), strict=True)
        ]

    @property
    def _horizon_s(self) -> float:
        objective = self.model.objective
        return RATE_TARGETS * (1.0 if objective is None else objective.ttft_s)

    def sampled(self, id: str, num_tokens: int, now_s: float) -> None:
        """Note further tokens of a request; one that is not followed is ignored."""
        if (one := self.requests.get(id)) is None or not num_tokens:
            return
        table, row = self._table, one.row
        before = int(table.num_tokens[row])
        table.num_tokens[row] = total = before + num_tokens
        if not before:
            table.waiting[row], table.first_s[row] = 0.0, now_s
        if before.bit_length() != total.bit_length():
            table.expected[row] = one.length.mean(total)

    def moved(self, ids: Iterable[str], worker: str) -> None:
        """Note that another worker than was planned generates the tokens of these requests."""
        for id in ids:
            if (one := self.requests.get(id)) is not None:
                self._table.worker[one.row] = self._number(worker)

    def ended(self, id: str, *, truncated: bool | None) -> None:
        """Forget a request, and learn its length unless it was aborted (`truncated` is None)."""
        if (one := self.requests.pop(id, None)) is None:
            return
        num_tokens, _, _ = self._forget(one)
        if truncated is None or not num_tokens:
            return
        most = max(one.max_tokens, num_tokens)
        self.lengths.observe(one.key, num_tokens, max_tokens=most, truncated=truncated)


def prompt_id(prompt: Sequence[int]) -> str:
    """Return a short name of a prompt: equal prompts have equal ones."""
    return hashlib.blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=12).hexdigest()
