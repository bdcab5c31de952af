"""Rollouts in a background thread while the trainer trains. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from millrace.rollout.backend import EngineBackend
from millrace.rollout.engine_pool import Engines
from millrace.rollout.manager import Found, RolloutBatch, RolloutManager

# Poll interval of the thread's exit flag, and how long other threads wait for its lock.
_POLL_S = 0.1


class BackgroundRollouts:
    """`RolloutManager` for the trainer's thread, as a context manager; a thread of its own handles events."""

    def __init__(self, rollouts: RolloutManager, backend: EngineBackend) -> None:
        """Create the thread, which entering the context starts; the rollouts have begun on this backend."""
        self._rollouts, self._backend = rollouts, backend
        self._engines = rollouts.engines()
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="millrace-rollouts", daemon=True)

    def __enter__(self) -> BackgroundRollouts:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop the thread."""
        self._stopped = True
        self._thread.join()

    def next_batch(self, deadline_s: float) -> RolloutBatch:
        """Wait for a batch; reraise errors of the thread."""
        with self._changed:
            return self._rollouts.next_batch(deadline_s, self._wait)

    def until(self, ready: Callable[[], Found | None], what: str, deadline_s: float) -> Found:
        """Wait until `ready` returns a value; reraise errors of the thread."""
        with self._changed:
            self._check()
            return self._rollouts.until(ready, what, deadline_s, self._wait)

    def update_weights(self, version: int) -> None:
        """Send the trainer's weights to every engine; the trainer may change them after the return."""
        with self._changed:
            self._rollouts.update_weights(version)

    def wait_for_weights(self, deadline_s: float) -> None:
        """Wait until the newest weights are in force; reraise errors of the thread."""
        with self._changed:
            self._rollouts.wait_for_weights(deadline_s, self._wait)

    def blockers(self) -> list[str]:
        """Return what the next batch or weight update waits for; also works while the thread is stuck."""
        if not self._changed.acquire(timeout=_POLL_S):
            return [f"{self._thread.name} (handles events)"]
        try:
            return self._rollouts.blockers()
        finally:
            self._changed.release()

    def engines(self) -> Engines:
        """Return the state of the engines; while the thread is stuck, the last known state."""
        if self._changed.acquire(timeout=_POLL_S):
            try:
                self._engines = self._rollouts.engines()
            finally:
                self._changed.release()
        return self._engines

    def pause(self) -> None:
        """Collect the partial output of all in-flight requests; see `RolloutManager.pause`."""
        with self._changed:
            self._rollouts.pause()

    def state(self) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """Return the state for a checkpoint; see `RolloutManager.state`."""
        with self._changed:
            return self._rollouts.state()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make no decision within the block; events that occur meanwhile are handled after it."""
        with self._changed:
            yield

    def _run(self) -> None:
        while not self._stopped:
            with self._keeping_errors():
                self._backend.wait(self._rollouts.patience_s(_POLL_S))
            with self._changed:
                # Within the lock: a waiting thread must see an error before a half-made decision.
                with self._keeping_errors():
                    self._rollouts.handle(self._backend.poll())
                self._changed.notify_all()

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure, self._stopped = self._failure or error, True

    def _wait(self, timeout_s: float) -> None:
        self._check()
        self._changed.wait(timeout_s)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
