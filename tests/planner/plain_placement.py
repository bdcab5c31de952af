"""The placement of a request, worker by worker and request by request: the slow twin of `placement.place`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from millrace.planner.placement import (
    DELAY_WEIGHT,
    HYSTERESIS,
    MOST_BUSY,
    SHARPNESS,
    Apart,
    Here,
    NewRequest,
    Placement,
    RequestStates,
    RouteUsed,
    ServingModel,
    WorkerState,
)


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


def table_of(requests: Sequence[Sequence[RequestState]]) -> RequestStates:
    """The requests of each worker as one table."""
    rows = [(worker, *one) for worker, some in enumerate(requests) for one in some]
    worker_R, *columns = zip(*rows, strict=True) if rows else ((),) * 7
    return RequestStates(np.array(worker_R, int), *(np.array(column, float) for column in columns))


def plain_place(
    request: NewRequest,
    workers: Sequence[WorkerState],
    requests: Sequence[Sequence[RequestState]],
    model: ServingModel,
    num_prefill: int = 0,
    previous: RouteUsed | None = None,
) -> Placement:
    """Place a request as `place` does."""
    seen = [_PlainWorker(one, some, request, model) for one, some in zip(workers, requests, strict=True)]
    num_prefill = min(num_prefill, len(workers) - 1)
    here, one = min(((worker.whole(), worker.name) for worker in seen[num_prefill:]), key=itemgetter(0))
    firsts = [worker for worker in seen[:num_prefill] if worker.can_send]
    short = request.num_prompt <= model.block_size or request.num_output <= 1
    if not firsts or not request.can_split or short:
        return Placement(Here(one), here, math.inf)
    first = min(firsts, key=_PlainWorker.first_score)
    last = min(seen[num_prefill:], key=lambda worker: first.split(worker))
    apart = first.split(last)
    factor = {"here": 1 - HYSTERESIS, "apart": 1 / (1 - HYSTERESIS), None: 1.0}[previous]
    found = Apart(first.name, last.name) if apart < here * factor else Here(one)
    return Placement(found, here, apart)


class _PlainWorker:
    """Predictions for one worker, and what a new request would change."""

    def __init__(
        self, state: WorkerState, requests: Sequence[RequestState], request: NewRequest, model: ServingModel
    ) -> None:
        self.name, self.can_send = state.name, state.can_send
        self._request, self._model, self._objective = request, model, model.objective
        cost, self._drift = model.cost, state.drift
        self._rows = [one for one in requests if one.left > 0]
        num_rows, context = len(self._rows), sum(one.context for one in self._rows)
        room = max(1, model.max_batch_tokens - num_rows)
        self._row_s = self._drift * (cost.token_s + cost.row_s)
        self._context_s = self._drift * (cost.pair_s + cost.context_s)
        self._pair_s = self._drift * (cost.pair_s + cost.context_s / room)
        # A step that computes no prompt, and what prompts add to their steps.
        self.step_s = self._drift * cost.step_s + self._row_s * num_rows + self._context_s * context
        waiting = [one.waiting for one in requests if one.waiting]
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
                score += _violation(after, objective.tpot_s) - _violation(before, objective.tpot_s)
        return score

    def _own(self, ttft_s: float, tpot_s: float) -> float:
        """Score of the new request itself, for each of its samples."""
        first, last = self._objective.ttft_s, self._objective.tpot_s
        both = 1 - (1 - _violation(ttft_s, first)) * (1 - _violation(tpot_s, last))
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

    def split(self, last: _PlainWorker) -> float:
        """Score if this worker computes the prompt and another one the tokens."""
        own = self._own(self.ttft_s, last._own_tpot(last._transfer_s))
        return own + self._added(prompt=True, tokens=False) + last._added(prompt=False, tokens=True)


def _violation(seconds: float, target_s: float) -> float:
    return 1 / (1 + (target_s / seconds) ** SHARPNESS) if seconds > 0 else 0.0
