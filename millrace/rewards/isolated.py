"""Rewards whose judges run in child processes, where a hang or a crash costs one answer and no more."""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.rewards.errors import RewardError
from millrace.rewards.process import JudgeProcess
from millrace.rewards.sandbox import FUNCTION_PERMISSIONS, Permissions
from millrace.rewards.wire import encode_row
from millrace.types import Outcome, Prompt

_START_UP_S = 60.0
_BATCH = 64
# Answers of a call that still wait after so long are slow, and worth the start of more children.
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
    """One call of `score`: what was asked, which answers wait for a judge, and the outcomes so far.

    Once `patient_s` of the clock is over, every answer that waits may have a child of its own.
    """

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    rows: dict[int, Any]
    waiting: deque[int]
    outcomes: dict[int, Outcome]
    patient_s: float = math.inf


class IsolatedReward:
    """Judges completions in child processes, each answer under a deadline.

    The specs: `{"kind": "number"}` (math-verify), `{"kind": "task", "name": ..., "options": {...}}`
    (reasoning-gym), `{"kind": "format", "pattern": ...}` (regular expression) and
    `{"kind": "function", "function": "module:function"}`.

    An answer whose judge takes too long, raises, dies or returns no finite number is `failed`; the others are
    still scored, each judged once. Children start when first needed, more of them where answers are many or
    take long, and end with `close` or with this process, however it ends. Outcomes do not depend on how many
    there are. Calls from several threads wait for each other.

    Args:
        spec: kind and options of the judge.
        timeout_s: one answer may take so long before its judge is killed.
        num_workers: at most so many children.
        permissions: what the judge may do beside computing and reading files. By default a function may write
            temporary files and has 4 GiB; a built-in judge writes nothing and has 2 GiB.
        clock: seconds, never going back.

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
        """Check the settings; no child is started yet."""
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
        self._processes: list[JudgeProcess] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._closing = False

    def check(self) -> None:
        """Start a judge and wait until it can judge, so that a mistake shows before anything is sampled.

        Raises:
            RewardError: the judge cannot be set up, or did not start within 60 s; the message says why.
        """
        self._run(_Work((), (), {}, deque(), {}), start=True)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """One outcome for each completion, in order.

        Raises:
            RewardError: a judge cannot be started at all, or this is closed meanwhile.
            ValueError: there are not as many prompts as completions.
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
        """End the children; a `score` in another thread raises. A later one starts them again."""
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
                    if not process.ready:  # nobody listened to it since the last call
                        process.deadline = now + _START_UP_S
                while len(work.outcomes) < len(work.completions) or (start and not self._any_ready()):
                    self._feed(work)
                    self._turn(work)
                    if self._closing:
                        raise RewardError(f"{self._label()} was closed while it judged")
            except BaseException:  # also Ctrl-C: a half-read conversation must not leak into the next call
                self._kill_all()
                raise

    def _any_ready(self) -> bool:
        return any(process.ready for process in self._processes)

    def _start(self) -> None:
        process = JudgeProcess(self._spec, self._permissions, self._selector)
        process.deadline = self._clock() + _START_UP_S
        self._processes.append(process)

    def _feed(self, work: _Work) -> None:
        """Give every idle child its part; start another one where there is more than they get done soon."""
        for process in list(self._processes):
            if process.ready and not process.batch and process.is_gone():
                self._bury(process, work, process.obituary())
        free = [process for process in self._processes if not process.batch]
        most = 1 if self._clock() >= work.patient_s else _BATCH
        while not self._processes or (
            len(self._processes) < self._num_workers and len(work.waiting) > most * len(free)
        ):
            self._start()
            free.append(self._processes[-1])
        for process in free:
            if process.ready and work.waiting:
                share = min(_BATCH, math.ceil(len(work.waiting) / self._num_workers))
                numbers = [work.waiting.popleft() for _ in range(share)]
                process.deadline = self._clock() + self._timeout_s
                process.ask(numbers, _message(work, numbers))

    def _turn(self, work: _Work) -> None:
        """Wait for news or the next deadline, and act on it."""
        # Only who was late before this look at the pipes is late: news may have lain there unread.
        now = self._clock()
        next_s = min(process.deadline for process in self._processes)
        if work.waiting and len(self._processes) < self._num_workers and work.patient_s > now:
            next_s = min(next_s, work.patient_s)
        for process in {key.data for key, _ in self._selector.select(max(0.0, next_s - now))}:
            for message in process.exchange():
                self._receive(process, message, work)
        for process in list(self._processes):
            if process.broken:
                self._bury(process, work, process.broken)
            elif process.ended:
                self._bury(process, work, process.obituary())
            elif process.deadline <= now:
                limit_s = self._timeout_s if process.ready else _START_UP_S
                gone = process.is_gone()
                self._bury(process, work, process.obituary() if gone else f"took longer than {limit_s:g} s")

    def _receive(self, process: JudgeProcess, message: Any, work: _Work) -> None:
        if isinstance(message, dict):
            if "error" in message:
                raise RewardError(message["error"])
            process.ready = True
        else:
            kind, value, reason = message
            outcome = Outcome.failure(reason) if kind == "failed" else Outcome(kind, value, reason)
            work.outcomes[process.batch.popleft()] = outcome
        process.deadline = self._clock() + self._timeout_s if process.batch else math.inf

    def _bury(self, process: JudgeProcess, work: _Work, reason: str) -> None:
        """Kill a child; the answer it was at has failed, those behind it wait for another child."""
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
    """A batch: each prompt once, and for each answer the place of its prompt."""
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
