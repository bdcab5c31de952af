"""Placement of a request by the cost model of a step: on one worker, or prompt and tokens on two. No torch.

`place` is what a server and its simulation call. A candidate is scored by the violations of the objective
that it is expected to add: of the request itself, and of those that the workers have. A prompt behind q
others and D requests that decode is computed in

    n = ceil(sum of prompt tokens / (batch tokens - D)) steps, which take
    n (c0 + (c1 + c3) D + (c2 + c4) sum(context)) + sum over prompts (c1 q + (c2 + c4 / batch tokens) q^2 / 2)

seconds. A request that decodes beside it waits for those prompts too, as far as it still runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from millrace.errors import PlanError

if TYPE_CHECKING:
    from millrace.planner.engine_cost import EngineCost

RouteUsed = Literal["here", "apart"]
# The other route is taken only if it lowers the score by more than this fraction.
HYSTERESIS = 0.1
# P(violation) = 1 / (1 + (target / predicted)^SHARPNESS): a deviation of 20 % of the predicted seconds.
SHARPNESS = 8.0
# Weight of seconds over their target, which decide where violations do not.
DELAY_WEIGHT = 0.01
# Largest fraction of a worker's time that prompts to come are expected to take.
MOST_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds that the first token, and each further one on average, may take at most."""

    ttft_s: float
    tpot_s: float

    def is_met(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether a request stayed within both."""
        return ttft_s <= self.ttft_s and tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer of keys and values takes latency_s + bytes / bytes_per_s."""

    latency_s: float = 1e-3
    bytes_per_s: float = 10e9

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a transfer."""
        return self.latency_s + num_bytes / self.bytes_per_s


class RequestState(NamedTuple):
    """A request as one worker has it.

    Attributes:
        waiting: prompt tokens that this worker has yet to compute.
        context: tokens of prompt and answer so far.
        left: further tokens that it is expected to generate at this worker; 0 if another one will.
        ttft_s: seconds to its first token, or since its arrival if there is none.
        num_tokens: generated so far.
        decode_s: seconds since its first token.
    """

    waiting: int
    context: int
    left: float
    ttft_s: float
    num_tokens: int
    decode_s: float


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker has to do.

    Attributes:
        name: of the worker.
        requests: those that it has, or that are on their way to it.
        free_tokens: of its KV cache, beside what its requests are expected to need.
        prompt_rate: prompt tokens a second that it was given lately.
        drift: factor of actual over predicted seconds of its steps.
        can_send: whether it may begin another transfer.
    """

    name: str
    requests: Sequence[RequestState]
    free_tokens: float
    prompt_rate: float = 0.0
    drift: float = 1.0
    can_send: bool = True


class NewRequest(NamedTuple):
    """Tokens of a prompt, expected tokens of each sample, samples, and whether two workers may serve it."""

    num_prompt: int
    num_output: float
    num_samples: int = 1
    can_split: bool = True


@dataclass(frozen=True, slots=True)
class ServingModel:
    """What predictions need: cost of a step, tokens of a step at most, blocks, the link and the objective."""

    cost: EngineCost
    max_batch_tokens: int
    block_size: int
    block_bytes: int
    link: Link
    objective: Objective


@dataclass(frozen=True, slots=True)
class Here:
    """One engine computes prompt and tokens."""

    engine: str


@dataclass(frozen=True, slots=True)
class Apart:
    """One engine computes the prompt, and another one the tokens after the first."""

    prefill: str
    decode: str


Place: TypeAlias = Here | Apart


class Placement(NamedTuple):
    """A decision and the scores that led to it: the best of either route, infinite if there is none."""

    place: Place
    here: float
    apart: float

    @property
    def route(self) -> RouteUsed:
        """The route of the decision."""
        return "here" if isinstance(self.place, Here) else "apart"


def place(
    request: NewRequest,
    workers: Sequence[WorkerState],
    model: ServingModel,
    num_prefill: int = 0,
    previous: RouteUsed | None = None,
) -> Placement:
    """Place a request where it is expected to add the fewest violations of the objective.

    The first `num_prefill` workers compute prompts alone, for the others, which may also serve a request
    whole. Without such workers all requests are served whole. `previous` is the route of the last request;
    the other one must be better by HYSTERESIS.

    Raises:
        PlanError: there is no worker.
    """
    if not workers:
        raise PlanError("a request cannot be placed without workers")
    seen = [_Worker(worker, request, model) for worker in workers]
    num_prefill = min(num_prefill, len(workers) - 1)
    # Of equal scores the first one counts.
    here, one = min(((worker.whole(), worker.name) for worker in seen[num_prefill:]), key=itemgetter(0))
    firsts = [worker for worker in seen[:num_prefill] if worker.can_send]
    if (
        not firsts
        or not request.can_split
        or request.num_prompt <= model.block_size
        or request.num_output <= 1
    ):
        return Placement(Here(one), here, math.inf)
    first = min(firsts, key=_Worker.first_score)
    last = min(seen[num_prefill:], key=lambda worker: first.split(worker))
    apart = first.split(last)
    factor = {"here": 1 - HYSTERESIS, "apart": 1 / (1 - HYSTERESIS), None: 1.0}[previous]
    found = Apart(first.name, last.name) if apart < here * factor else Here(one)
    return Placement(found, here, apart)


class _Worker:
    """Predictions for one worker, and what a new request would change."""

    def __init__(self, state: WorkerState, request: NewRequest, model: ServingModel) -> None:
        self.name, self.can_send = state.name, state.can_send
        self._request, self._model, self._objective = request, model, model.objective
        cost, self._drift = model.cost, state.drift
        self._rows = [one for one in state.requests if one.left > 0]
        num_rows, context = len(self._rows), sum(one.context for one in self._rows)
        room = max(1, model.max_batch_tokens - num_rows)
        self._row_s = self._drift * (cost.token_s + cost.row_s)
        self._context_s = self._drift * (cost.pair_s + cost.context_s)
        self._pair_s = self._drift * (cost.pair_s + cost.context_s / room)
        # A step that computes no prompt, and what prompts add to their steps.
        self.step_s = self._drift * cost.step_s + self._row_s * num_rows + self._context_s * context
        waiting = [one.waiting for one in state.requests if one.waiting]
        self._queued_s = sum(map(self._prompt_s, waiting))
        self._num_steps = -(-sum(waiting) // room)
        self._own_s = self._prompt_s(request.num_prompt)
        self._num_own_steps = -(-(sum(waiting) + request.num_prompt) // room)
        self._busy = min(MOST_BUSY, state.prompt_rate * self._drift * cost.token_s)
        needed = request.num_prompt + request.num_samples * request.num_output
        self._has_room = needed <= state.free_tokens
        self._before = [self._tpot(one, 0.0) for one in self._rows]
        # Seconds to the first token of the new request, after a step that may run.
        self.ttft_s = self.step_s / 2 + self._num_own_steps * self.step_s + self._queued_s + self._own_s

    def _prompt_s(self, num_tokens: int) -> float:
        """Seconds that a prompt adds to the steps that compute it."""
        own = self._drift * (self._model.cost.token_s * num_tokens + self._model.cost.row_s)
        return own + self._pair_s * num_tokens**2 / 2

    def _beside(self, left: float, num_steps: int, prompts_s: float) -> float:
        """Seconds that prompts add to so many further tokens: those that wait, and those to come."""
        now_s = prompts_s * min(1.0, left / num_steps) if num_steps else 0.0
        return max(now_s, left * self.step_s * self._busy / (1 - self._busy))

    def _tpot(self, one: RequestState, more_s: float) -> float:
        """Seconds of a further token on average, until the end of a request that the worker has."""
        left_s = one.left * self.step_s + self._beside(one.left, self._num_steps, self._queued_s) + more_s
        return (one.decode_s + left_s) / max(1.0, one.num_tokens + one.left - 1)

    def _added(self, *, prompt: bool, tokens: bool) -> float:
        """Score that others get by the new request's prompt and its tokens."""
        request, objective, score = self._request, self._objective, 0.0
        each_s = self._row_s + self._context_s * (request.num_prompt + request.num_output / 2)
        for one, before in zip(self._rows, self._before, strict=True):
            more_s = 0.0
            if prompt:
                own_s = self._queued_s + self._own_s
                more_s += self._beside(one.left, self._num_own_steps, own_s)
                more_s -= self._beside(one.left, self._num_steps, self._queued_s)
            if tokens:
                more_s += request.num_samples * each_s * min(one.left, request.num_output)
            after = before + more_s / max(1.0, one.num_tokens + one.left - 1)
            score += DELAY_WEIGHT * (after - before) / objective.tpot_s
            if one.ttft_s <= objective.ttft_s:
                score += violation(after, objective.tpot_s) - violation(before, objective.tpot_s)
        return score

    def _own(self, ttft_s: float, tpot_s: float) -> float:
        """Score of the new request itself, for each of its samples."""
        first, last = self._objective.ttft_s, self._objective.tpot_s
        both = 1 - (1 - violation(ttft_s, first)) * (1 - violation(tpot_s, last))
        return self._request.num_samples * (both + DELAY_WEIGHT * (ttft_s / first + tpot_s / last))

    def _own_tpot(self, wait_s: float) -> float:
        """Seconds of a further token of the new request, if its first one waits for `wait_s`."""
        request, left = self._request, max(1.0, self._request.num_output - 1)
        each_s = self._row_s + self._context_s * (request.num_prompt + request.num_output / 2)
        step_s = self.step_s + request.num_samples * each_s
        beside_s = (
            self._beside(left, self._num_steps, self._queued_s)
            if wait_s
            else left * step_s * self._busy / (1 - self._busy)
        )
        full = 0.0 if self._has_room else self._objective.tpot_s * left
        return (wait_s + left * step_s + beside_s + full) / left

    def whole(self) -> float:
        """Score if this worker computes prompt and tokens."""
        return self._own(self.ttft_s, self._own_tpot(0.0)) + self._added(prompt=True, tokens=True)

    def first_score(self) -> float:
        """Score of the prompt alone."""
        return self._own(self.ttft_s, 0.0) + self._added(prompt=True, tokens=False)

    @property
    def _transfer_s(self) -> float:
        """Seconds of the transfer to this worker, and of what it computes again."""
        model = self._model
        num_bytes = self._request.num_prompt / model.block_size * model.block_bytes
        return model.link.seconds(num_bytes) + self._prompt_s(model.block_size // 2) + self.step_s / 2

    def split(self, last: _Worker) -> float:
        """Score if this worker computes the prompt and another one the tokens."""
        own = self._own(self.ttft_s, last._own_tpot(last._transfer_s))
        return own + self._added(prompt=True, tokens=False) + last._added(prompt=False, tokens=True)


def violation(seconds: float, target_s: float) -> float:
    """Return the probability that predicted seconds, which may be wrong, exceed a target."""
    return 1 / (1 + (target_s / seconds) ** SHARPNESS) if seconds > 0 else 0.0
