"""Validity of the serving simulation: a workload on a real engine, and the same in the simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from millrace.inference.engine import PagedEngine
from millrace.inference.engine_sizes import EngineSizes
from millrace.inference.request import Request
from millrace.inference.scheduler import Plan
from millrace.planner.engine_cost import EngineCost, ErrorSummary, error_summary
from millrace.planner.step_drift import StepDrift
from millrace.simulation.arrivals import ServingRequest
from millrace.simulation.serving import ServedTimes, ServingSimulation
from millrace.simulation.step_engines import (
    ModelledEngine,
    Sample,
    StepResult,
    StepSeconds,
    step_seconds,
)
from millrace.types import SamplingParams


class RecordedEngine:
    """A real engine in a simulation: its steps are computed, and take on the virtual clock what they took.

    `steps` are its plans and their wall seconds, `tokens` what each of them sampled.
    """

    def __init__(self, engine: PagedEngine) -> None:
        self.steps: list[tuple[Plan, float]] = []
        self.tokens: list[list[int]] = []
        self._engine = engine
        engine.watch_steps(lambda plan, seconds: self.steps.append((plan, seconds)))

    def add(self, id: str, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        """Queue a request."""
        (request,) = self._engine.add(prompt, [params], ids=[id])
        return request

    def step(self) -> StepResult | None:
        """Compute a step; RuntimeError if a request failed."""
        num_steps = len(self.steps)
        sampled = self._engine.step()
        if len(self.steps) == num_steps:
            return None
        self.tokens.append([int(self._engine.generated(request)[0][-1]) for request in sampled])
        ended = [request for request in sampled if request.finish_reason is not None]
        for request in ended:
            if request.finish_reason == "error":
                raise RuntimeError(f"request {request.id} failed: {request.reason}")
            self._engine.completion(request)
        return StepResult(self.steps[-1][1], sampled, ended)


@dataclass(frozen=True, slots=True)
class ServingValidity:
    """A simulation beside what it simulates.

    Attributes:
        num_steps: steps of the real engine.
        num_unlike: steps whose plan differs when the simulation gets the recorded seconds and tokens, missing
            and surplus ones included; 0 if the simulated scheduler is that of the engine.
        step_error: of the cost model, over the steps of the engine.
        corrected_error: the same, each prediction times the drift of the steps before it.
        drift: factor real / predicted after the last step.
        makespan: real seconds to the end of the last request, and simulated ones with the cost model.
        ttft: mean seconds to the first token, real and simulated with the cost model.
    """

    num_steps: int
    num_unlike: int
    step_error: ErrorSummary
    corrected_error: ErrorSummary
    drift: float
    makespan: tuple[float, float]
    ttft: tuple[float, float]


def validate_serving(
    engine: PagedEngine, sizes: EngineSizes, requests: Sequence[ServingRequest], cost: EngineCost
) -> ServingValidity:
    """Serve requests on an idle engine of these sizes and in the simulation, and compare them.

    The engine's prefix cache must be empty, or it finds what the simulation does not.

    Raises:
        RuntimeError: a request failed on the engine.
        ValueError: the engine can never serve a request.
    """
    recorded = RecordedEngine(engine)
    try:
        real = ServingSimulation([("both", recorded)]).run(requests)
    finally:
        engine.watch_steps(None)
    replayed: list[Plan] = []
    replay = ModelledEngine(
        sizes,
        _noting(replayed, iter([step_s for _, step_s in recorded.steps])),
        _given(iter(recorded.tokens)),
    )
    ServingSimulation([("both", replay)]).run(requests)
    pairs = zip(recorded.steps, replayed, strict=False)
    num_unlike = sum(decisions(plan) != decisions(other) for (plan, _), other in pairs)
    num_unlike += abs(len(recorded.steps) - len(replayed))
    drift, predict = StepDrift(), step_seconds(cost)
    errors, corrected = [], []
    for plan, actual_s in recorded.steps:
        predicted_s = predict(plan)
        errors.append(predicted_s / actual_s - 1)
        corrected.append(predicted_s * drift.factor / actual_s - 1)
        drift.add(actual_s, predicted_s)
    modelled = ServingSimulation([("both", ModelledEngine(sizes, predict))]).run(requests)
    return ServingValidity(
        num_steps=len(recorded.steps),
        num_unlike=num_unlike,
        step_error=error_summary(errors),
        corrected_error=error_summary(corrected),
        drift=drift.factor,
        makespan=(_end(real), _end(modelled)),
        ttft=(_ttft(real), _ttft(modelled)),
    )


def decisions(plan: Plan) -> tuple[bytes, ...]:
    """Return what a plan decides: rows, their tokens, what is sampled, and copies of blocks."""
    return tuple(getattr(plan, field.name).tobytes() for field in fields(plan))


def _noting(plans: list[Plan], seconds: Iterator[float]) -> StepSeconds:
    def of(plan: Plan) -> float:
        plans.append(plan)
        # A simulation that goes on for longer has failed already; it may end.
        return next(seconds, 1.0)

    return of


def _given(tokens: Iterator[list[int]]) -> Sample:
    def sample(num: int) -> np.ndarray:
        # Another number than was recorded is a plan that differs.
        return np.resize(np.array(next(tokens, []) or [0], np.int32), num)

    return sample


def _end(times: Sequence[ServedTimes]) -> float:
    return max(one.last_s for one in times)


def _ttft(times: Sequence[ServedTimes]) -> float:
    return sum(one.ttft_s for one in times) / len(times)
