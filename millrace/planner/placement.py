"""Placement of a request by the cost model of a step: on one worker, or prompt and tokens on two. No torch.

`place` is what a server and its simulation call. A candidate is scored by the violations of the objective
that it is expected to add: of the request itself, and of those that the workers have. A prompt behind q
others and D requests that decode is computed in

    n = ceil(sum of prompt tokens / (batch tokens - D)) steps, which take
    n (c0 + (c1 + c3) D + (c2 + c4) sum(context)) + sum over prompts (c1 q + (c2 + c4 / batch tokens) q^2 / 2)

seconds. A request that decodes beside it waits for those prompts too, as far as it still runs.

Without an objective the end of all requests counts (makespan), as in a batch of a training run. A candidate
is then scored by when its workers will have done all that they have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

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


class RequestStates(NamedTuple):
    """Requests as workers have them: one row for each request and worker, so two for one on its way.

    Attributes:
        worker_R: position of the worker among those that are given with the table.
        waiting_R: prompt tokens that this worker has yet to compute.
        context_R: tokens of prompt and answer so far.
        left_R: further tokens that it is expected to generate at this worker; 0 if another one will.
        ttft_R: seconds to its first token, or since its arrival if there is none.
        num_tokens_R: generated so far.
        decode_R: seconds since its first token.
    """

    worker_R: np.ndarray
    waiting_R: np.ndarray
    context_R: np.ndarray
    left_R: np.ndarray
    ttft_R: np.ndarray
    num_tokens_R: np.ndarray
    decode_R: np.ndarray


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What is known of a worker beside its requests.

    Attributes:
        name: of the worker.
        free_tokens: of its KV cache, beside what its requests are expected to need.
        prompt_rate: prompt tokens a second that it was given lately.
        drift: factor of actual over predicted seconds of its steps.
        can_send: whether it may begin another transfer.
    """

    name: str
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
    """What predictions need: cost of a step, tokens of a step at most, blocks, the link and the objective.

    Without an objective the end of all requests counts.
    """

    cost: EngineCost
    max_batch_tokens: int
    block_size: int
    block_bytes: int
    link: Link
    objective: Objective | None


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
    table: RequestStates,
    model: ServingModel,
    num_prefill: int = 0,
    previous: RouteUsed | None = None,
) -> Placement:
    """Place a request where it is expected to add the fewest violations of the objective.

    `table` has the requests of all workers. The first `num_prefill` workers compute prompts alone, for the
    others, which may also serve a request whole. Without such workers all requests are served whole. Where
    the end of all requests counts, any worker may do either part, and `num_prefill` is 0.
    `previous` is the route of the last request; the other one must be better by HYSTERESIS.

    Raises:
        PlanError: there is no worker.
    """
    if not workers:
        raise PlanError("a request cannot be placed without workers")
    seen: _Predictions = (
        _Ends(workers, table, request, model)
        if model.objective is None
        else _Violations(workers, table, request, model, model.objective)
    )
    num_prefill = min(num_prefill, len(workers) - 1)
    # Of equal scores the first one counts.
    here_W = seen.whole()[num_prefill:]
    one = int(here_W.argmin())
    here, whole = float(here_W[one]), Here(workers[num_prefill + one].name)
    num_senders = num_prefill if model.objective is not None else len(workers) if len(workers) > 1 else 0
    firsts = [number for number in range(num_senders) if workers[number].can_send]
    if (
        not firsts
        or not request.can_split
        or request.num_prompt <= model.block_size
        or request.num_output <= 1
    ):
        return Placement(whole, here, math.inf)
    first_W = seen.first()
    first = min(firsts, key=first_W.__getitem__)
    apart_W = seen.split(first)
    apart_W[first] = math.inf
    apart_W = apart_W[num_prefill:]
    last = int(apart_W.argmin())
    apart = float(apart_W[last])
    factor = {"here": 1 - HYSTERESIS, "apart": 1 / (1 - HYSTERESIS), None: 1.0}[previous]
    split = Apart(workers[first].name, workers[num_prefill + last].name)
    return Placement(split if apart < here * factor else whole, here, apart)


class _Predictions(ABC):
    """Predictions for W workers, and what a new request would change; R are the requests that decode."""

    def __init__(
        self, workers: Sequence[WorkerState], table: RequestStates, request: NewRequest, model: ServingModel
    ) -> None:
        self._request, self._model, cost = request, model, model.cost
        self._num_workers = len(workers)
        self._drift_W = np.array([one.drift for one in workers])
        self._rows = rows = RequestStates(*(column[table.left_R > 0] for column in table))
        num_W, context_W = self._summed(np.ones(len(rows.left_R))), self._summed(rows.context_R)
        room_W = np.maximum(1, model.max_batch_tokens - num_W)
        self._row_W = self._drift_W * (cost.token_s + cost.row_s)
        self._context_W = self._drift_W * (cost.pair_s + cost.context_s)
        self._pair_W = self._drift_W * (cost.pair_s + cost.context_s / room_W)
        # A step that computes no prompt, and what prompts add to their steps.
        self.step_W = self._drift_W * cost.step_s + self._row_W * num_W + self._context_W * context_W
        is_waiting = table.waiting_R > 0
        waiting, at = table.waiting_R[is_waiting], table.worker_R[is_waiting]
        queued_W = np.bincount(at, waiting, self._num_workers)
        self._queued_W = np.bincount(at, self._prompt_s(waiting, at), self._num_workers)
        self._steps_W = np.ceil(queued_W / room_W)
        self._own_W = self._prompt_s(np.full(self._num_workers, float(request.num_prompt)), slice(None))
        self._own_steps_W = np.ceil((queued_W + request.num_prompt) / room_W)
        rate_W = np.array([one.prompt_rate for one in workers])
        busy_W = np.minimum(MOST_BUSY, rate_W * self._drift_W * cost.token_s)
        # Seconds that prompts to come add to a second of steps.
        self._more_W = busy_W / (1 - busy_W)
        needed = request.num_prompt + request.num_samples * request.num_output
        self._has_room_W = np.array([needed <= one.free_tokens for one in workers])
        self._later_R = np.maximum(1.0, rows.num_tokens_R + rows.left_R - 1)
        self._beside_R = self._beside(rows.left_R, rows.worker_R, self._steps_W, self._queued_W)
        left_s = rows.left_R * self.step_W[rows.worker_R] + self._beside_R
        self._before_R = (rows.decode_R + left_s) / self._later_R
        # Seconds to the first token of the new request, after a step that may run.
        self.ttft_W = self.step_W / 2 + self._own_steps_W * self.step_W + self._queued_W + self._own_W

    def _summed(self, number_R: np.ndarray) -> np.ndarray:
        """Sums over the requests that each worker decodes."""
        return np.bincount(self._rows.worker_R, number_R, self._num_workers)

    def _prompt_s(self, num_tokens: np.ndarray, worker: np.ndarray | slice) -> np.ndarray:
        """Seconds that prompts add to the steps that compute them."""
        cost = self._model.cost
        own = self._drift_W[worker] * (cost.token_s * num_tokens + cost.row_s)
        return own + self._pair_W[worker] * num_tokens**2 / 2

    def _beside(
        self, left: np.ndarray, worker: np.ndarray | slice, steps_W: np.ndarray, prompts_W: np.ndarray
    ) -> np.ndarray:
        """Seconds that prompts add to so many further tokens: those that wait, and those to come."""
        steps = steps_W[worker]
        now_s = np.where(steps > 0, prompts_W[worker] * np.minimum(1.0, left / np.maximum(1.0, steps)), 0.0)
        return np.maximum(now_s, left * self.step_W[worker] * self._more_W[worker])

    def _each_s(self) -> np.ndarray:
        """Seconds that a sample of the new request adds to a step, of each worker."""
        request = self._request
        return self._row_W + self._context_W * (request.num_prompt + request.num_output / 2)

    def _transfer_s(self) -> np.ndarray:
        """Seconds from the end of the prompt at another worker to the next step here."""
        model, num_prompt = self._model, self._request.num_prompt
        again_W = self._prompt_s(np.full(self._num_workers, float(model.block_size // 2)), slice(None))
        num_bytes = num_prompt / model.block_size * model.block_bytes
        return model.link.seconds(num_bytes) + again_W + self.step_W / 2

    @abstractmethod
    def whole(self) -> np.ndarray:
        """Scores if a worker computes prompt and tokens."""

    @abstractmethod
    def first(self) -> np.ndarray:
        """Scores of the prompt alone."""

    @abstractmethod
    def split(self, first: int) -> np.ndarray:
        """Scores if the worker at `first` computes the prompt and each of the others the tokens."""


class _Violations(_Predictions):
    """Violations of the objective that a new request adds."""

    def __init__(
        self,
        workers: Sequence[WorkerState],
        table: RequestStates,
        request: NewRequest,
        model: ServingModel,
        objective: Objective,
    ) -> None:
        super().__init__(workers, table, request, model)
        self._objective = objective

    def _added(self, *, prompt: bool, tokens: bool) -> np.ndarray:
        """Scores that others get by the new request's prompt and its tokens, of each worker."""
        request, objective, rows = self._request, self._objective, self._rows
        more_R = np.zeros(len(rows.left_R))
        if prompt:
            own_W = self._queued_W + self._own_W
            more_R += self._beside(rows.left_R, rows.worker_R, self._own_steps_W, own_W) - self._beside_R
        if tokens:
            each_R = self._each_s()[rows.worker_R]
            more_R += request.num_samples * each_R * np.minimum(rows.left_R, request.num_output)
        before_R = self._before_R
        after_R = before_R + more_R / self._later_R
        late_R = violation(after_R, objective.tpot_s) - violation(before_R, objective.tpot_s)
        score_R = np.where(rows.ttft_R <= objective.ttft_s, late_R, 0.0)
        return self._summed(score_R + DELAY_WEIGHT * (after_R - before_R) / objective.tpot_s)

    def _own(self, ttft_W: np.ndarray, tpot_W: np.ndarray) -> np.ndarray:
        """Score of the new request itself, for each of its samples."""
        first, last = self._objective.ttft_s, self._objective.tpot_s
        both_W = 1 - (1 - violation(ttft_W, first)) * (1 - violation(tpot_W, last))
        return self._request.num_samples * (both_W + DELAY_WEIGHT * (ttft_W / first + tpot_W / last))

    def _own_tpot(self, wait_W: np.ndarray | None = None) -> np.ndarray:
        """Seconds of a further token of the new request, if its first one waits for `wait_W`."""
        request, left = self._request, max(1.0, self._request.num_output - 1)
        step_W = self.step_W + request.num_samples * self._each_s()
        if wait_W is None:
            spent_W = left * step_W * self._more_W
        else:
            left_W = np.full(self._num_workers, left)
            spent_W = wait_W + self._beside(left_W, slice(None), self._steps_W, self._queued_W)
        full_W = np.where(self._has_room_W, 0.0, self._objective.tpot_s * left)
        return (spent_W + left * step_W + full_W) / left

    def whole(self) -> np.ndarray:
        """Scores if a worker computes prompt and tokens."""
        return self._own(self.ttft_W, self._own_tpot()) + self._added(prompt=True, tokens=True)

    def first(self) -> np.ndarray:
        """Scores of the prompt alone."""
        return self._own(self.ttft_W, np.zeros(self._num_workers)) + self._added(prompt=True, tokens=False)

    def split(self, first: int) -> np.ndarray:
        """Scores if the worker at `first` computes the prompt and each of the others the tokens."""
        ttft_W = np.full(self._num_workers, self.ttft_W[first])
        own_W = self._own(ttft_W, self._own_tpot(self._transfer_s()))
        return own_W + self._added(prompt=True, tokens=False)[first] + self._added(prompt=False, tokens=True)


class _Ends(_Predictions):
    """When each worker will have done all that it has and a new request's part: in seconds from now.

    A worker takes as many steps as its longest request needs, behind the prompts that wait, or as its cache
    allows; and in them the seconds of each prompt and of each token.
    """

    def __init__(
        self, workers: Sequence[WorkerState], table: RequestStates, request: NewRequest, model: ServingModel
    ) -> None:
        super().__init__(workers, table, request, model)
        rows = self._rows
        waits_R = rows.waiting_R > 0
        self._waiting_W, self._running_W = np.zeros(len(workers)), np.zeros(len(workers))
        np.maximum.at(self._waiting_W, rows.worker_R[waits_R], rows.left_R[waits_R])
        np.maximum.at(self._running_W, rows.worker_R[~waits_R], rows.left_R[~waits_R])
        held_R = rows.left_R * (rows.context_R + rows.left_R / 2)
        # Tokens of the cache times steps for which they are held; and seconds of all tokens.
        self._held_W = self._summed(held_R)
        self._tokens_W = self._row_W * self._summed(rows.left_R) + self._context_W * self._held_W
        used_W = self._summed(rows.context_R + rows.left_R)
        self._capacity_W = np.maximum(1.0, used_W + np.array([one.free_tokens for one in workers]))

    def _end(self, *, prompt: bool, tokens: bool) -> np.ndarray:
        request = self._request
        left = request.num_output if tokens else 0.0
        held = request.num_samples * left * (request.num_prompt + left / 2)
        waiting_W = np.maximum(self._waiting_W, left) if prompt else self._waiting_W
        running_W = self._running_W if prompt else np.maximum(self._running_W, left)
        behind_W = np.where(waiting_W > 0, waiting_W + (self._own_steps_W if prompt else self._steps_W), 0.0)
        alone_W = self._own_steps_W if prompt else self._steps_W
        steps_W = np.maximum(np.maximum(running_W, behind_W), alone_W)
        steps_W = np.maximum(steps_W, (self._held_W + held) / self._capacity_W)
        tokens_W = self._tokens_W + request.num_samples * left * self._row_W + held * self._context_W
        prompts_W = self._queued_W + self._own_W if prompt else self._queued_W
        return self._drift_W * self._model.cost.step_s * steps_W + tokens_W + prompts_W

    def whole(self) -> np.ndarray:
        return self._end(prompt=True, tokens=True)

    def first(self) -> np.ndarray:
        return self._end(prompt=True, tokens=False)

    def split(self, first: int) -> np.ndarray:
        request = self._request
        step_W = self._drift_W * self._model.cost.step_s + request.num_samples * self._each_s()
        # What the worker has meanwhile is done before or after.
        alone_W = self.ttft_W[first] + self._transfer_s() + request.num_output * step_W
        return np.maximum(self.first()[first], np.maximum(self._end(prompt=False, tokens=True), alone_W))


def violation(seconds: np.ndarray, target_s: float) -> np.ndarray:
    """Return the probability that predicted seconds, which may be wrong, exceed a target."""
    odds = (seconds / target_s) ** SHARPNESS
    return odds / (1 + odds)
