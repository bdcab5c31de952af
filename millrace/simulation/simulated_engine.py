"""One simulated engine on a virtual clock: a request queue, and one token per running request and step."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.planner.durations import Quantile, StepCost, constant, share_of
from millrace.rollout.backend import GenerateRequest, GenerateResult
from millrace.types import Completion, Prompt

_WORD = 7  # every generated token after the first
# Callback for a busy interval: engine name, begin, end and number of requests; 0 for a weight update.
Watch = Callable[[str, float, float, int], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations and results of simulated engines and rewards.

    Attributes:
        service: step time model of an engine.
        num_tokens: length of an answer, before truncation to `max_tokens`.
        score_s: seconds of a reward call.
        load_s: seconds of a weight update, during which an engine generates nothing.
        recompute: whether the keys and values of running requests are recomputed then, a prompt once.
        slots: maximum number of running requests of an engine; the others wait in FIFO order.
        message_s: latency of an event in seconds.
        reward: returns the value of an answer.
        num_answers: number of distinct answers to a prompt.
        environment_s: seconds of a step of an environment.
    """

    service: StepCost = StepCost()
    num_tokens: Quantile = field(default=constant(100.0))
    score_s: Quantile = field(default=constant(0.1))
    load_s: Quantile = field(default=constant(0.5))
    recompute: bool = False
    slots: int = 1_000_000
    message_s: Quantile = field(default=constant(1e-3))
    reward: Callable[[Prompt, str], float] = field(default=lambda prompt, text: float(int(text) % 2))
    num_answers: int = 4
    environment_s: Quantile = field(default=constant(0.1))


class VirtualEngine:
    """One engine. Its clock counts steps; every running request generates one token per step.

    `Costs.service` is the cost of a step. Tokens and length of an answer are functions of the request's seed.
    """

    def __init__(self, name: str, costs: Costs, slowness: float, watch: Watch) -> None:
        self.name = name
        self.hangs = False
        self.clock, self.at_s, self.busy_until_s = 0.0, 0.0, 0.0
        # Each with the clock at its start, infinite while it waits, and its remaining length.
        self.requests: dict[str, tuple[GenerateRequest, float, int]] = {}
        self.plan = 0
        self._costs, self._slowness, self._watch = costs, slowness, watch
        self._ends: list[tuple[float, int, str]] = []
        self._waiting: deque[str] = deque()
        self._num_started = self._num_running = 0
        self._weights: list[tuple[float, int]] = []

    def advance(self, now_s: float) -> None:
        """Run the steps up to now, except for the time in which the engine was blocked."""
        begin_s = max(self.at_s, min(self.busy_until_s, now_s))
        if self._num_running and not self.hangs and begin_s < now_s:
            self.clock += (now_s - begin_s) / self._step_s()
            self._watch(self.name, begin_s, now_s, self._num_running)
        self.at_s = now_s

    def stop_for(self, seconds: float, num_running: int) -> None:
        """Block generation for so many seconds, after earlier blocks."""
        begin_s = max(self.busy_until_s, self.at_s)
        self.busy_until_s = begin_s + seconds
        self._watch(self.name, begin_s, self.busy_until_s, num_running)

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue requests and start those with a free slot; a shared prompt is computed once."""
        num_known: float = sum(map(len, {request.prompt for request in requests}))
        for request in requests:
            length = round(self._costs.num_tokens(share_of(request.params.seed)))
            left = max(1, min(request.params.max_tokens, length) - _num_partial(request))
            self.requests[request.id] = (request, math.inf, left)
            self._waiting.append(request.id)
            num_known += _num_partial(request)
        self._begin()
        self._compute(num_known)

    def end(self, id: str, *, aborted: bool = False) -> GenerateResult:
        """End a request and return its result."""
        request, start, length = self._pop(id)
        if aborted:
            length = max(0, min(length - 1, int(self.clock - start)))
        versions = self._versions(start, length)
        seed = request.params.seed
        tokens = ((seed & 0xFFFF,) + (_WORD,) * length)[:length]
        if request.partial_output is not None:
            tokens = request.partial_output.token_ids + (_WORD,) * length
            versions = np.concatenate((request.partial_output.versions, versions))
        total = len(tokens)
        completion = Completion(
            token_ids=tokens,
            logprobs=np.full(total, -1.0, np.float32),
            versions=versions,
            finish_reason="abort" if aborted else "length" if total == request.params.max_tokens else "stop",
            text=str(seed % self._costs.num_answers),
        )
        return GenerateResult(self.name, id, completion, math.ceil(start), math.ceil(start) + length)

    def _pop(self, id: str) -> tuple[GenerateRequest, float, int]:
        """Remove a request; return it with its start clock and its length, which is 0 if it never started."""
        request, start, length = self.requests.pop(id)
        if start == math.inf:
            return request, self.clock, 0
        self._num_running -= 1
        self._begin()
        return request, start, length

    def recompute(self) -> None:
        """Recompute the keys and values of all running requests."""
        running = [(request, start) for request, start, _ in self.requests.values() if start < math.inf]
        num_known: float = sum(map(len, {request.prompt for request, _ in running}))
        for request, start in running:
            num_known += self.clock - start + _num_partial(request)
        self._compute(num_known)

    def _begin(self) -> None:
        while self._waiting and self._num_running < self._costs.slots:
            id = self._waiting.popleft()
            if id in self.requests:
                request, _, length = self.requests[id]
                self.requests[id] = (request, self.clock, length)
                self._num_started += 1
                self._num_running += 1
                heapq.heappush(self._ends, (self.clock + length, self._num_started, id))

    def _compute(self, num_tokens: float) -> None:
        self.stop_for(num_tokens * self._costs.service.prompt_token_s * self._slowness, self._num_running)

    def set_weights(self, version: int) -> None:
        """Generate with this version from here on."""
        oldest = min((start for _, start, _ in self.requests.values()), default=self.clock)
        first = bisect_right(self._weights, oldest, key=lambda one: one[0]) - 1
        self._weights = [*self._weights[max(first, 0) :], (self.clock, version)]

    def _versions(self, start: float, length: int) -> np.ndarray:
        """Return the version of each token of a request; a token has that of the start of its step."""
        if not self._weights:
            raise RuntimeError(f"{self.name} got a request before it had weights")
        last_clock, last_version = self._weights[-1]
        if last_clock <= start:
            return np.full(length, last_version, np.int32)
        clocks = np.array([clock for clock, _ in self._weights])
        places = np.searchsorted(clocks, start + np.arange(length), side="right") - 1
        versions: np.ndarray = np.array([version for _, version in self._weights], np.int32)[places]
        return versions

    def next_end_s(self) -> float:
        """Return the time at which the next request ends, if nothing changes."""
        while self._ends and self._ends[0][2] not in self.requests:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return max(self.at_s, self.busy_until_s) + max(0.0, self._ends[0][0] - self.clock) * self._step_s()

    def pop_ended(self) -> Iterator[str]:
        """Yield the ids of completed requests, in order of completion."""
        # The clock is a sum of many small steps; its rounding neither misses the last token nor adds up.
        while self._ends and self._ends[0][0] <= self.clock + 1e-6:
            end, _, id = heapq.heappop(self._ends)
            self.clock = end if end > self.clock - 1e-6 else self.clock
            if id in self.requests:
                yield id

    def _step_s(self) -> float:
        return self._costs.service.token_s(self._num_running) * self._slowness


def _num_partial(request: GenerateRequest) -> int:
    """Return the length of its partial output."""
    return 0 if request.partial_output is None else len(request.partial_output.token_ids)
