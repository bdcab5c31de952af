"""Synchronous engine backend: generation and scoring run in the calling thread, without concurrency."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import numpy as np

from millrace.environments.running_episodes import CloseEpisode, StepEnvironment
from millrace.environments.synchronous import SynchronousEnvironments
from millrace.protocols import Engine, EpisodeReward
from millrace.rollout.backend import (
    Abort,
    EngineCommand,
    Event,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    RestartTurns,
    Score,
    ScoreResult,
    Submit,
    UpdateWeights,
    WeightsLoaded,
    score_all,
)
from millrace.types import Completion

NAME = "engine-0"
NOTHING = Completion((), np.empty(0, np.float32), np.empty(0, np.int32), "abort", "")


class InProcessBackend:
    """An `EngineBackend` over one `protocols.Engine`, which may be data-parallel over all ranks of a run.

    `wait` generates all submitted requests in one `generate` call, in the order of submission, and scores all
    pending texts in one `score` call. An engine step is a `generate` call here.
    """

    def __init__(
        self,
        engine: Engine,
        reward: EpisodeReward,
        update_weights: Callable[[int], None],
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
        environments: SynchronousEnvironments | None = None,
        before_scoring: Callable[[Sequence[str]], object] = lambda calls: None,
    ) -> None:
        """Take the engine, the reward and the environments; the last two are closed with this backend.

        `update_weights` updates the engine to the trainer's weights under a policy version, and verifies
        them. `span` is a profiling span around generation (`sample`), scoring (`score`) and environments
        (`environment`). `before_scoring` gets the ids of the calls that the reward scores next.
        """
        self._engine, self._reward, self._span = engine, reward, span
        self._update_weights, self._environments = update_weights, environments
        self._before_scoring = before_scoring
        self._num_steps = 0
        self._requests: list[GenerateRequest] = []
        self._calls: list[Score] = []
        self._events: list[Event] = []

    def now(self) -> float:
        """Return this machine's monotonic time in seconds."""
        return time.monotonic()

    def engines(self) -> list[str]:
        """Return the name of the only engine."""
        return [NAME]

    def execute(self, command: EngineCommand) -> None:
        """Queue requests and texts for the next `wait`; update the engine's weights now.

        Raises:
            WeightSyncError: the engine could not verify the new weights.
            RuntimeError: the command would stop or start an engine; this thread has one.
        """
        match command:
            case Submit(_, requests):
                self._requests += requests
            case Abort(engine, ids):
                at = self._num_steps
                ended = [request.id for request in self._requests if request.id in ids]
                self._events += [GenerateResult(engine, id, NOTHING, at, at) for id in ended]
                self._requests = [request for request in self._requests if request.id not in ids]
            case UpdateWeights(version):
                self._update_weights(version)
            case LoadWeights(engine, version):
                # `UpdateWeights` has loaded them already.
                self._events.append(WeightsLoaded(engine, version, self._num_steps))
            case Score():
                self._calls.append(command)
            case StepEnvironment() | CloseEpisode() if self._environments is not None:
                self._environments.execute(command)
            case RestartTurns():
                pass  # the order of commands determines everything
            case _:
                raise RuntimeError(f"{NAME} is the only engine of this thread, which cannot do {command}")

    def wait(self, timeout_s: float) -> None:
        """Generate, score and step everything that is queued; the timeout does not apply.

        Raises:
            RuntimeError: nothing is queued, so the wait would never end.
            Exception: any error of the engine or the reward.
            TimeoutError: an environment did not reply in time.
        """
        if self._requests:
            requests, self._requests = self._requests, []
            with self._span("sample"):
                completions = self._engine.generate(
                    [request.prompt for request in requests], [request.params for request in requests]
                )
            began, self._num_steps = self._num_steps, self._num_steps + 1
            self._events += [
                GenerateResult(NAME, request.id, completion, began, began + 1)
                for request, completion in zip(requests, completions, strict=True)
            ]
        if self._calls:
            calls, self._calls = self._calls, []
            self._before_scoring([call.id for call in calls])
            with self._span("score"):
                scored = score_all(self._reward, calls)
            outcomes = iter(scored)
            self._events += [ScoreResult(call.id, tuple(islice(outcomes, len(call.texts)))) for call in calls]
        if self._environments is not None and self._environments.num_pending:
            with self._span("environment"):
                self._events += self._environments.collect()
        if not self._events:
            raise RuntimeError("no request is in flight in this thread, so no event can occur")

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close the reward and the environments."""
        self._reward.close()
        if self._environments is not None:
            self._environments.close()
