"""Rewards that run in worker processes, so that a hang or a crash fails only one completion."""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.rewards.process import RewardWorker
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.sandbox import FUNCTION_PERMISSIONS, Permissions
from millrace.rewards.worker_wire import encode_row
from millrace.types import Outcome, Prompt

_START_UP_S = 60.0
_BATCH = 64
# After this time the completions still pending count as slow, and more workers are started for them.
PATIENCE_S = 0.25
_OPTIONS: Mapping[str, frozenset[str]] = {
    "number": frozenset(),
    "task": frozenset({"name", "options"}),
    "format": frozenset({"pattern"}),
    "function": frozenset({"function"}),
}
_NEEDS_ROW = frozenset({"task", "function"})


@dataclass(slots=True)
class _Work:
    """State of one call of `score`: its inputs, the queue of unassigned completions, the outcomes so far.

    After clock time `patient_s`, each queued completion may get its own worker, up to `num_workers`.
    """

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    rows: dict[int, Any]
    waiting: deque[int]
    outcomes: dict[int, Outcome]
    patient_s: float = math.inf


class IsolatedReward:
    """Score completions in worker processes, killing a worker after `timeout_s` for one completion.

    The specs: `{"kind": "number"}` (math-verify), `{"kind": "task", "name": ..., "options": {...}}`
    (reasoning-gym), `{"kind": "format", "pattern": ...}` (regular expression) and `{"kind": "function",
    "function": "module:function"}`.

    A completion is `failed` if scoring it times out, raises, crashes the worker or returns no finite number.
    The other completions are still scored, each of them once. Workers start on demand, more of them for large
    batches or slow rewards. They end with `close` or with this process, even if it is killed. Outcomes do not
    depend on the number of workers. Calls from several threads are serialized. By default a function may
    write temporary files and has 4 GiB; a built-in reward writes nothing and has 2 GiB.

    Raises:
        RewardError: the spec is not one of the above, or a number is not positive.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        timeout_s: float,
        num_workers: int = 2,
        permissions: Permissions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        kind = str(spec.get("kind"))
        if kind not in _OPTIONS:
            raise RewardError(f"there is no isolated reward of kind {kind}; there are: {', '.join(_OPTIONS)}")
        if set(spec) - {"kind"} != _OPTIONS[kind]:
            needed = ", ".join(sorted(_OPTIONS[kind])) or "no options"
            raise RewardError(f"reward {kind} was given {sorted(set(spec) - {'kind'})}; it takes {needed}")
        if not timeout_s > 0 or not math.isfinite(timeout_s):
            raise RewardError(
                f"timeout_s of reward {kind} is {timeout_s}; it must be a finite number above 0"
            )
        if num_workers < 1:
            raise RewardError(f"num_workers of reward {kind} is {num_workers}; it must be at least 1")
        self._spec = dict(spec)
        self._timeout_s = timeout_s
        self._num_workers = num_workers
        self._permissions = permissions or (FUNCTION_PERMISSIONS if kind == "function" else Permissions())
        self._clock = clock
        self._processes: list[RewardWorker] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._closing = False

    def check(self) -> None:
        """Start a worker and wait until it is ready, so that a mistake shows before anything is sampled.

        Raises:
            RewardError: the reward cannot be set up, or its worker did not start within 60 s; the message
                names the cause.
        """
        self._run(_Work((), (), {}, deque(), {}), start=True)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """Return one outcome for each completion, in order.

        Raises:
            RewardError: no worker can be started, or `close` was called concurrently.
            ValueError: the numbers of prompts and completions differ.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; each needs its own")
        work = _Work(prompts, completions, {}, deque(), {})
        for number, prompt in enumerate(prompts):
            try:
                if id(prompt) not in work.rows:
                    work.rows[id(prompt)] = encode_row(prompt.row if self._spec["kind"] in _NEEDS_ROW else {})
                work.waiting.append(number)
            except TypeError as error:
                work.outcomes[number] = Outcome.failure(
                    f"the row of prompt {prompt.id} holds a {error}, which JSON cannot carry to the judge; "
                    "turn it into text or numbers in the data"
                )
        self._run(work, start=False)
        return [work.outcomes[number] for number in range(len(completions))]

    def close(self) -> None:
        """Stop the workers. A concurrent `score` raises; a later `score` starts new workers."""
        self._closing = True
        for process in list(self._processes):
            process.end()
        with self._lock:
            self._kill_all()
            self._closing = False

    def _run(self, work: _Work, *, start: bool) -> None:
        with self._lock:
            try:
                now = self._clock()
                work.patient_s = now + PATIENCE_S
                for process in self._processes:
                    if not process.ready:  # its pipes were not read since the last call
                        process.deadline = now + _START_UP_S
                while len(work.outcomes) < len(work.completions) or (start and not self._any_ready()):
                    self._feed(work)
                    self._turn(work)
                    if self._closing:
                        raise RewardError(f"{self._label()} was closed while it scored")
            except BaseException:  # also Ctrl-C: partly read messages must not leak into the next call
                self._kill_all()
                raise

    def _any_ready(self) -> bool:
        return any(process.ready for process in self._processes)

    def _start(self) -> None:
        process = RewardWorker(self._spec, self._permissions, self._selector)
        process.deadline = self._clock() + _START_UP_S
        self._processes.append(process)

    def _feed(self, work: _Work) -> None:
        for process in list(self._processes):
            if process.ready and not process.batch and process.is_gone():
                self._remove(process, work, process.exit_reason())
        free = [process for process in self._processes if not process.batch]
        most = 1 if self._clock() >= work.patient_s else _BATCH
        while not self._processes or (
            len(self._processes) < self._num_workers and len(work.waiting) > most * len(free)
        ):
            self._start()
            free.append(self._processes[-1])
        for process in free:
            if process.ready and work.waiting:
                count = min(_BATCH, math.ceil(len(work.waiting) / self._num_workers))
                numbers = [work.waiting.popleft() for _ in range(count)]
                process.deadline = self._clock() + self._timeout_s
                process.ask(numbers, _message(work, numbers))

    def _turn(self, work: _Work) -> None:
        # Deadlines are compared with the time before the pipes are read: a message may have waited unread.
        now = self._clock()
        next_s = min(process.deadline for process in self._processes)
        if work.waiting and len(self._processes) < self._num_workers and work.patient_s > now:
            next_s = min(next_s, work.patient_s)
        for process in {key.data for key, _ in self._selector.select(max(0.0, next_s - now))}:
            for message in process.exchange():
                self._receive(process, message, work)
        for process in list(self._processes):
            if process.broken:
                self._remove(process, work, process.broken)
            elif process.ended:
                self._remove(process, work, process.exit_reason())
            elif process.deadline <= now:
                limit_s = self._timeout_s if process.ready else _START_UP_S
                gone = process.is_gone()
                self._remove(
                    process, work, process.exit_reason() if gone else f"took longer than {limit_s:g} s"
                )

    def _receive(self, process: RewardWorker, message: Any, work: _Work) -> None:
        if isinstance(message, dict):
            if "error" in message:
                raise RewardError(message["error"])
            process.ready = True
        else:
            kind, value, reason = message
            outcome = Outcome.failure(reason) if kind == "failed" else Outcome(kind, value, reason)
            work.outcomes[process.batch.popleft()] = outcome
        process.deadline = self._clock() + self._timeout_s if process.batch else math.inf

    def _remove(self, process: RewardWorker, work: _Work, reason: str) -> None:
        """Kill a worker: its current completion fails, the rest of its batch returns to the queue."""
        self._processes.remove(process)
        process.kill()
        if not process.ready:
            raise RewardError(f"{self._label()} did not start: {reason}")
        if process.batch:
            work.outcomes[process.batch.popleft()] = Outcome.failure(reason)
        work.waiting.extendleft(reversed(process.batch))

    def _kill_all(self) -> None:
        while self._processes:
            self._processes.pop().kill()

    def _label(self) -> str:
        kind = self._spec["kind"]
        return f"reward {kind} {self._spec['function']}" if kind == "function" else f"reward {kind}"


def _message(work: _Work, numbers: Sequence[int]) -> dict[str, Any]:
    places: dict[int, int] = {}
    prompts: list[tuple[str, str, Any]] = []
    items: list[tuple[int, str]] = []
    for number in numbers:
        prompt = work.prompts[number]
        if id(prompt) not in places:
            places[id(prompt)] = len(prompts)
            prompts.append((prompt.text, prompt.answer, work.rows[id(prompt)]))
        items.append((places[id(prompt)], work.completions[number]))
    return {"prompts": prompts, "items": items}
