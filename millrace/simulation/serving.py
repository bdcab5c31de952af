"""Simulation of serving: requests arrive at engines that run the real scheduler on a virtual clock. No torch.

An engine either serves whole requests (collocated), or it computes prompts with their first token, or the
tokens after it (disaggregated); or it does what the cost model finds best for each request (adaptive).
Between two engines the keys and values of the prompt travel: they start once the decode engine has room, and
its link carries one prompt at a time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from millrace.errors import PlanError
from millrace.inference.engine_sizes import EngineSizes
from millrace.inference.request import Request
from millrace.planner.engine_cost import EngineCost
from millrace.planner.placement import Here, Link, Objective, Place, ServingModel
from millrace.planner.request_tracker import RequestTracker, WorkerFacts
from millrace.simulation.arrivals import ServingRequest, at_rate, mean_rate
from millrace.simulation.role_placement import EngineLoad, Role, place_by_role
from millrace.simulation.step_engines import (
    ModelledEngine,
    StepEngine,
    StepResult,
    step_seconds,
)
from millrace.types import SamplingParams

# Policies that place each request by the cost model.
BY_COST = ("adaptive", "makespan")
# Requests of the beginning that do not count, while the engines fill up.
WARM_UP = 0.1
# Of requests within the objective, for a rate to count as goodput.
GOOD_FRACTION = 0.9
# Halvings of an octave of rates, and how far from the first rate they may be.
NUM_HALVINGS, MAX_FACTOR = 4, 16.0


@dataclass(slots=True)
class ServedTimes:
    """When the tokens of a request were there, in seconds of the clock."""

    request: ServingRequest
    first_s: float = math.nan
    last_s: float = math.nan
    num_tokens: int = 0

    def add(self, now_s: float) -> None:
        """Record a token."""
        self.num_tokens += 1
        self.last_s = now_s
        if self.num_tokens == 1:
            self.first_s = now_s

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens after the first; 0 for a single one."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


class _Transfer(NamedTuple):
    """A prompt that is computed on `prefill`: its first token, the lease of its blocks and their number."""

    request: ServingRequest
    prefill: _Server
    first_token: int
    lease: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + 1


@dataclass(slots=True, eq=False)
class _Server:
    """An engine, what is on its way to it, and whether it computes.

    `arriving` transfers wait for room; `in_transit` tokens have theirs. `requests` are those that it has and
    those on their way to it.
    """

    name: str
    role: Role
    engine: StepEngine
    inbox: list[Callable[[], object]] = field(default_factory=list)
    is_busy: bool = False
    arriving: deque[_Transfer] = field(default_factory=deque)
    in_transit: int = 0
    link_free_s: float = 0.0
    requests: dict[str, ServedTimes] = field(default_factory=dict)

    @property
    def load(self) -> EngineLoad:
        requests = self.requests.values()
        return EngineLoad(
            name=self.name,
            role=self.role,
            waiting_tokens=sum(len(one.request.prompt) for one in requests if not one.num_tokens),
            num_requests=len(requests),
            context_tokens=sum(len(one.request.prompt) + one.num_tokens for one in requests),
        )

    @property
    def modelled(self) -> ModelledEngine:
        assert isinstance(self.engine, ModelledEngine), f"{self.name} must be a ModelledEngine"
        return self.engine


class ServingSimulation:
    """Serves a list of requests on engines with roles; `run` returns the times of each request.

    Engines with the role both may be any `StepEngine`; others are `ModelledEngine`s whose blocks have
    `block_bytes`, and so are all of them if a `tracker` places requests in place of their roles. A simulation
    runs once.
    """

    def __init__(
        self,
        engines: Sequence[tuple[Role, StepEngine]],
        *,
        link: Link | None = None,
        tracker: RequestTracker | None = None,
    ) -> None:
        names = [f"{role}-{index}" for index, (role, _) in enumerate(engines)]
        self._servers = {
            name: _Server(name, role, engine) for name, (role, engine) in zip(names, engines, strict=True)
        }
        self._link, self._tracker = link or Link(), tracker
        # Requests by where their prompts were computed.
        self.num_here = self.num_apart = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned, self._now_s = 0, 0.0
        self._times: dict[str, ServedTimes] = {}
        # The decode engine of a request whose prompt is computed on another one.
        self._decode_of: dict[str, _Server] = {}

    def run(self, requests: Sequence[ServingRequest]) -> list[ServedTimes]:
        """Serve the requests to the end of the last one; the times are in the order of `requests`.

        Raises:
            ValueError: an engine can never serve a request.
        """
        for request in requests:
            self._times[str(request.number)] = ServedTimes(request)
            self._at(request.arrival_s, partial(self._arrive, request))
        while self._agenda:
            self._now_s, _, act = heapq.heappop(self._agenda)
            act()
        unserved = [id for id, times in self._times.items() if times.num_tokens < times.request.num_output]
        if unserved:
            raise RuntimeError(f"{len(unserved)} requests were never served, the first is {unserved[0]}")
        return list(self._times.values())

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._agenda, (time_s, self._num_planned, act))

    def _arrive(self, request: ServingRequest) -> None:
        found = self._place(request)
        if isinstance(found, Here):
            self.num_here += 1
            self._submit(self._servers[found.engine], request, request.num_output)
            return
        self.num_apart += 1
        if request.num_output > 1:
            id, decode = str(request.number), self._servers[found.decode]
            self._decode_of[id], decode.requests[id] = decode, self._times[id]
        self._submit(self._servers[found.prefill], request, 1)

    def _place(self, request: ServingRequest) -> Place:
        if self._tracker is None:
            return place_by_role(len(request.prompt), [server.load for server in self._servers.values()])
        workers = [WorkerFacts(one.name, one.modelled.num_slots) for one in self._servers.values()]
        most = workers[0].capacity - len(request.prompt)
        id = str(request.number)
        return self._tracker.place([id], request.prompt, [most], workers, self._now_s)

    def _submit(self, server: _Server, request: ServingRequest, num_tokens: int) -> None:
        id = str(request.number)
        params = SamplingParams(max_tokens=num_tokens, seed=request.number)
        server.requests[id] = self._times[id]
        server.inbox.append(partial(server.engine.add, id, request.prompt, params))
        self._wake(server)

    def _wake(self, server: _Server) -> None:
        """Start a step of an engine that is between two steps, if it has something to compute."""
        if server.is_busy:
            return
        for act in server.inbox:
            act()
        server.inbox.clear()
        result = server.engine.step()
        if result is not None:
            server.is_busy = True
            self._at(self._now_s + result.seconds, partial(self._stepped, server, result))

    def _stepped(self, server: _Server, result: StepResult) -> None:
        """The end of a step: its tokens are there."""
        server.is_busy = False
        for request in result.sampled:
            times = self._times[request.id]
            times.add(self._now_s)
            if self._tracker is not None:
                self._tracker.sampled(request.id, 1, self._now_s)
                if times.num_tokens == times.request.num_output:
                    self._tracker.ended(request.id, truncated=False)
        for request in result.ended:
            del server.requests[request.id]
            if (decode := self._decode_of.pop(request.id, None)) is not None:
                self._transfer(request, server, decode)
        self._pull(server)
        self._wake(server)

    def _transfer(self, ended: Request, prefill: _Server, decode: _Server) -> None:
        lease, num_blocks = prefill.modelled.export_prefix(ended.prompt)
        request, first_token = self._times[ended.id].request, int(ended.generated[0])
        decode.arriving.append(_Transfer(request, prefill, first_token, lease, num_blocks))
        self._pull(decode)

    def _pull(self, server: _Server) -> None:
        """Start the transfers for which a decode engine has room, in the order of their prompts."""
        while server.arriving:
            one = server.arriving[0]
            if not server.modelled.has_room(server.in_transit + one.num_tokens):
                return
            server.arriving.popleft()
            server.in_transit += one.num_tokens
            num_sent = max(0, one.num_blocks - server.modelled.num_cached(one.request.prompt))
            begin_s = max(self._now_s, server.link_free_s)
            server.link_free_s = begin_s + self._link.seconds(num_sent * server.modelled.block_bytes)
            self._at(server.link_free_s, partial(self._arrived, server, one))

    def _arrived(self, server: _Server, one: _Transfer) -> None:
        num_blocks = one.prefill.modelled.end_lease(one.lease)
        request = one.request

        def add() -> None:
            server.in_transit -= one.num_tokens
            server.modelled.import_prefix(request.prompt, num_blocks)
            params = SamplingParams(max_tokens=request.num_output)
            server.modelled.add(str(request.number), request.prompt, params, first_token=one.first_token)

        server.inbox.append(add)
        self._wake(one.prefill)
        self._wake(server)


def roles_of(policy: str, num_engines: int) -> list[Role]:
    """Return the role of each engine under a policy: `collocated`, `adaptive`, `makespan`, or P:D as in 1:3.

    Raises:
        PlanError: it is neither, or P and D are not all engines.
    """
    if policy in ("collocated", *BY_COST):
        return ["both"] * num_engines
    words = policy.split(":")
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        raise PlanError(
            f"policy {policy!r} is unknown; write collocated, adaptive, makespan, or P:D such as "
            f"1:{num_engines - 1}"
        )
    num_prefill, num_decode = map(int, words)
    if num_prefill + num_decode != num_engines:
        raise PlanError(f"policy {policy} has {num_prefill + num_decode} engines; there are {num_engines}")
    prefill: list[Role] = ["prefill"] * num_prefill
    decode: list[Role] = ["decode"] * num_decode
    return prefill + decode


@dataclass(frozen=True, slots=True)
class Serving:
    """Engines to simulate: their sizes, the cost of a step, and the link between them.

    `objective` is what the policy adaptive places requests for; `makespan` does for the end of all.
    """

    num_engines: int
    sizes: EngineSizes
    cost: EngineCost
    link: Link
    objective: Objective

    def run(self, policy: str, requests: Sequence[ServingRequest]) -> list[ServedTimes]:
        """Serve requests under a policy; PlanError if the engines can never serve one of them."""
        return self.run_counted(policy, requests)[0]

    def run_counted(self, policy: str, requests: Sequence[ServingRequest]) -> tuple[list[ServedTimes], float]:
        """Serve requests as `run` does; return also the fraction that one engine served whole."""
        roles, seconds = roles_of(policy, self.num_engines), step_seconds(self.cost)
        engines = [(role, ModelledEngine(self.sizes, seconds)) for role in roles]
        objective = self.objective if policy == "adaptive" else None
        tracker = RequestTracker(self.model(objective)) if policy in BY_COST else None
        simulation = ServingSimulation(engines, link=self.link, tracker=tracker)
        try:
            times = simulation.run(requests)
        except ValueError as error:
            raise PlanError(f"a request cannot be served: {error}") from None
        return times, simulation.num_here / len(requests)

    def model(self, objective: Objective | None) -> ServingModel:
        """Return what requests are placed by, for an objective or for the end of all of them."""
        sizes = self.sizes
        return ServingModel(
            self.cost, sizes.max_batch_tokens, sizes.block_size, sizes.block_bytes, self.link, objective
        )

    def goodput(self, policy: str, requests: Sequence[ServingRequest]) -> float | None:
        """Return the highest rate at which GOOD_FRACTION of the requests meet the objective.

        It is found by doubling or halving the rate of `requests`, then by bisection, to 5 %; None if it is
        below a MAX_FACTOR-th of that rate. Above MAX_FACTOR times that rate it is not sought.
        """
        rate = mean_rate(requests)

        def is_good(factor: float) -> bool:
            times = self.run(policy, at_rate(requests, rate * factor))
            return attainment(times, self.objective) >= GOOD_FRACTION

        low = high = 1.0
        if is_good(1.0):
            while is_good(high := 2 * low):
                low = high
                if low >= MAX_FACTOR:
                    return rate * low
        else:
            while not is_good(low := high / 2):
                high = low
                if high <= 1 / MAX_FACTOR:
                    return None
        for _ in range(NUM_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_good(middle) else (low, middle)
        return rate * low


def counted(times: Sequence[ServedTimes]) -> list[ServedTimes]:
    """Leave out the first WARM_UP of the requests, which arrive at empty engines."""
    return list(times[int(WARM_UP * len(times)) :])


def attainment(times: Sequence[ServedTimes], objective: Objective) -> float:
    """Return the fraction of requests that met the objective, without those of the warm-up."""
    return float(np.mean([objective.is_met(one.ttft_s, one.tpot_s) for one in counted(times)]))
