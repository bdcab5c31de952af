"""Synchronous engine backend: generation and scoring run in the calling thread, without concurrency."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import numpy as np

from millrace.protocols import Engine, Reward
from millrace.rollout.backend import (
    Event,
    GenerateRequest,
    GenerateResult,
    ScoreResult,
    Unrecorded,
    WeightsLoaded,
)
from millrace.types import Completion, Prompt

NAME = "engine-0"
NOTHING = Completion((), np.empty(0, np.float32), np.empty(0, np.int32), "abort", "")


class InProcessBackend(Unrecorded):
    """An `EngineBackend` over one `protocols.Engine`, which may be data-parallel over all ranks of a run.

    `wait` generates all submitted requests in one `generate` call, in the order of submission, and scores all
    pending texts in one `score` call. An engine step is a `generate` call here.
    """

    def __init__(
        self,
        engine: Engine,
        reward: Reward,
        send: Callable[[int], None],
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Take the engine and the reward.

        Args:
            engine: generates completions.
            reward: scores them; closed with this runtime.
            send: updates the engine to the trainer's weights under a policy version, and verifies them.
            span: profiling span around generation (`sample`) and scoring (`score`).
        """
        self._engine, self._reward, self._send, self._span = engine, reward, send, span
        self._num_steps = 0
        self._requests: list[GenerateRequest] = []
        self._calls: list[tuple[str, Sequence[Prompt], Sequence[str]]] = []
        self._events: list[Event] = []

    def now(self) -> float:
        """Return this machine's monotonic time in seconds."""
        return time.monotonic()

    def engines(self) -> list[str]:
        """Return the name of the only engine."""
        return [NAME]

    def submit(self, engine: str, requests: Sequence[GenerateRequest]) -> None:
        """Queue requests for the next `wait`."""
        self._requests += requests

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """Drop queued requests; each ends with an empty completion."""
        ended = set(ids)
        for request in self._requests:
            if request.id in ended:
                self._events.append(
                    GenerateResult(engine, request.id, NOTHING, self._num_steps, self._num_steps)
                )
        self._requests = [request for request in self._requests if request.id not in ended]

    def update_weights(self, version: int) -> None:
        """Update the engine's weights now.

        Raises:
            WeightSyncError: the engine could not verify the new weights.
        """
        self._send(version)

    def load(self, engine: str, version: int) -> None:
        """Emit `WeightsLoaded`; `update_weights` has loaded the weights already."""
        self._events.append(WeightsLoaded(engine, version, self._num_steps))

    def lose(self, engine: str, reason: str) -> None:
        """Fail: there is no replacement for the only engine.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{engine} is lost, and this thread has no other engine: {reason}")

    def scale(self, number: int) -> None:
        """Fail: this backend cannot scale beyond its one engine.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"the target is {number} engines, and this thread has one")

    def retire(self, engine: str) -> None:
        """Fail, as `lose` does.

        Raises:
            RuntimeError: always.
        """
        self.lose(engine, "it was drained")

    def score(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Queue texts for scoring in the next `wait`."""
        self._calls.append((id, prompts, texts))

    def wait(self, timeout_s: float) -> list[Event]:
        """Generate and score everything that is queued; the timeout does not apply.

        Raises:
            RuntimeError: nothing is queued, so the wait would never end.
            Exception: any error of the engine or the reward.
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
            with self._span("score"):
                scored = self._reward.score(
                    [prompt for _, prompts, _ in calls for prompt in prompts],
                    [text for _, _, texts in calls for text in texts],
                )
            outcomes = iter(scored)
            self._events += [ScoreResult(id, tuple(islice(outcomes, len(texts)))) for id, _, texts in calls]
        if not self._events:
            raise RuntimeError("no request is in flight in this thread, so no event can occur")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close the reward."""
        self._reward.close()
