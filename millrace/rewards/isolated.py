"""Rewards that run in worker processes, so that a hang or a crash fails only one completion."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from millrace.processes.bubblewrap import find_bubblewrap
from millrace.processes.child import ChildProcess, WorkerProgram
from millrace.processes.supervisor import ChildFailed, ChildLost, ChildReply, Supervisor
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.row_encoding import encode_row
from millrace.rewards.sandbox import (
    FUNCTION_PERMISSIONS,
    Permissions,
    sandboxed,
    visible_environment,
)
from millrace.types import Episode, Outcome, Prompt

_START_UP_S = 60.0
# Maximum number of processes of one worker, including those it starts.
_MAX_PROCESSES = 256
# The reason in a reply has at most a few hundred characters, and what goes with the score 16 times 1,000.
_MAX_REPLY_BYTES = 1 << 18
# Number of characters of a user's function's output that are copied to standard error.
_MAX_ECHO = 1 << 20
_BATCH = 64
# A worker reports a late call of an `async def` itself; one that reports nothing for so long more is killed.
_GRACE_S = 10.0
# Calls of an `async def` at once on each worker, unless the recipe sets the number.
_CONCURRENCY = 64
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

    `asked` maps requests to completions. `alone` are those that were with others on a worker that was lost:
    each is scored without others then, which shows the one that is the cause.
    After clock time `patient_s`, each queued completion may get its own worker, up to `num_workers`.
    """

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    episodes: Sequence[Episode]
    rows: dict[int, Any]
    waiting: deque[int]
    outcomes: dict[int, Outcome]
    asked: dict[tuple[ChildProcess, int], int] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)
    patient_s: float = math.inf


class IsolatedReward:
    """Score completions in worker processes, killing a worker after `timeout_s` for one completion.

    The specs: `{"kind": "number"}` (math-verify), `{"kind": "task", "name": ..., "options": {...}}`
    (reasoning-gym), `{"kind": "format", "pattern": ...}` (regular expression) and `{"kind": "function",
    "function": "module:function"}`.

    A completion is `failed` if scoring it times out, raises, crashes the worker or returns no finite number.
    The other completions are still scored, each of them once. An `async def` function is called for
    `concurrency` completions at once on each worker; if it crashes the worker or blocks its event loop, those
    in progress are scored again, one at a time. Workers start on demand, more of them for large
    batches or slow rewards. They end with `close` or with this process, even if it is killed. Outcomes do not
    depend on the number of workers. Calls from several threads are serialized. By default a function may
    write temporary files and has 4 GiB; a built-in reward writes nothing and has 2 GiB.

    Attributes:
        sees_episodes: whether the function takes an `episode`; known after `check`.

    Raises:
        RewardError: the spec is not one of the above, or a number is not positive.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        timeout_s: float,
        num_workers: int = 2,
        concurrency: int | None = None,
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
        self._concurrency = concurrency
        # Both are facts that a worker reports when it has started.
        self._is_async = False
        self.sees_episodes = False
        self._permissions = permissions or (FUNCTION_PERMISSIONS if kind == "function" else Permissions())
        self._clock = clock
        self._workers = Supervisor(self._program, clock=clock)
        self._lock = threading.Lock()
        self._closing = False

    def check(self) -> None:
        """Start a worker and wait until it is ready, so that a mistake shows before anything is sampled.

        Raises:
            RewardError: the reward cannot be set up, or its worker did not start within 60 s; the message
                names the cause.
        """
        self._run(_Work((), (), (), {}, deque(), {}), start=True)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """Return one outcome for each completion, in order.

        Raises:
            RewardError: no worker can be started, or `close` was called concurrently.
            ValueError: the numbers of prompts, completions and episodes differ; there may be no episodes if
                the reward does not see them.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; each needs its own")
        work = _Work(prompts, completions, episodes, {}, deque(), {})
        for number, prompt in enumerate(prompts):
            try:
                if id(prompt) not in work.rows:
                    work.rows[id(prompt)] = encode_row(prompt.row if self._spec["kind"] in _NEEDS_ROW else {})
                work.waiting.append(number)
            except TypeError as error:
                work.outcomes[number] = Outcome.failure(
                    f"the row of prompt {prompt.id} holds a {error}, which JSON cannot carry to the reward "
                    "worker; turn it into text or numbers in the data"
                )
        self._run(work, start=False)
        return [work.outcomes[number] for number in range(len(completions))]

    def close(self) -> None:
        """Stop the workers. A concurrent `score` raises; a later `score` starts new workers."""
        self._closing = True
        self._workers.end()
        with self._lock:
            self._workers.close()
            self._closing = False

    def _run(self, work: _Work, *, start: bool) -> None:
        with self._lock:
            try:
                work.patient_s = self._clock() + PATIENCE_S
                for worker in self._workers.children:
                    worker.restart_timeouts()
                # Workers that died since the last call are removed.
                self._receive(self._workers.wait(-math.inf), work)
                while len(work.outcomes) < len(work.completions) or (start and not self._is_ready()):
                    if self._is_ready():
                        self._feed(work)
                    elif not self._workers.children:
                        self._workers.start()
                    self._receive(self._workers.wait(self._until_s(work)), work)
                    if self._closing:
                        raise RewardError(f"{self._label()} was closed while it scored")
            except ChildFailed as error:
                self._workers.close()
                raise RewardError(error.refusal or str(error)) from None
            except BaseException:  # also Ctrl-C: partly read messages must not leak into the next call
                self._workers.close()
                raise

    def _is_ready(self) -> bool:
        """Return whether a worker has started; it reports whether the function is async and sees episodes."""
        for worker in self._workers.children:
            if worker.started:
                self._is_async, self.sees_episodes = worker.facts["is_async"], worker.facts["sees_episodes"]
                return True
        return False

    def _feed(self, work: _Work) -> None:
        workers = self._workers.children
        if self.sees_episodes and len(work.episodes) != len(work.completions):
            raise ValueError(f"{self._label()} takes episodes; there are {len(work.episodes)} of them")
        free = [worker for worker in workers if not worker.started or self._room(worker, work)]
        most = 1 if self._clock() >= work.patient_s else self._batch
        while not workers or (len(workers) < self._num_workers and len(work.waiting) > most * len(free)):
            free.append(self._workers.start())
        for worker in free:
            if worker.started and work.waiting:
                self._ask(worker, work, self._next(work, self._room(worker, work)))

    @property
    def _batch(self) -> int:
        """How many completions a worker is given at once."""
        return (self._concurrency or _CONCURRENCY) if self._is_async else _BATCH

    def _room(self, worker: ChildProcess, work: _Work) -> int:
        """Return how many completions a worker can be given now."""
        if not worker.pending:
            return self._batch
        if not self._is_async or any(work.asked.get((worker, id)) in work.alone for id in worker.pending):
            return 0
        return max(0, self._batch - len(worker.pending))

    def _next(self, work: _Work, room: int) -> list[int]:
        """Take the completions that a worker is given next; one that is to be alone only if it is idle."""
        if work.waiting[0] in work.alone:
            return [work.waiting.popleft()] if room == self._batch else []
        count = min(room, math.ceil(len(work.waiting) / self._num_workers))
        taken: list[int] = []
        while len(taken) < count and work.waiting and work.waiting[0] not in work.alone:
            taken.append(work.waiting.popleft())
        return taken

    def _ask(self, worker: ChildProcess, work: _Work, numbers: Sequence[int]) -> None:
        """Send the prompts of a batch, each once, then a request for each completion."""
        prompts = {id(work.prompts[number]): work.prompts[number] for number in numbers}
        places = {prompt: place for place, prompt in enumerate(prompts)}
        rows = [(prompt.text, prompt.answer, work.rows[key]) for key, prompt in prompts.items()]
        timeout_s = self._timeout_s + _GRACE_S if self._is_async else self._timeout_s
        if numbers:
            worker.notify(json.dumps({"prompts": rows}).encode())
        for number in numbers:
            item = [places[id(work.prompts[number])], work.completions[number]]
            if self.sees_episodes:
                item.append(asdict(work.episodes[number]))
            work.asked[worker, worker.request(json.dumps(item).encode(), timeout_s)] = number

    def _until_s(self, work: _Work) -> float:
        patient = work.waiting and len(self._workers.children) < self._num_workers
        return work.patient_s if patient and work.patient_s > self._clock() else math.inf

    def _receive(self, events: Sequence[ChildReply | ChildLost], work: _Work) -> None:
        """Store outcomes. Of a lost worker the completion in progress fails; the others return to the queue.

        If several were in progress, all return, to be scored one at a time.
        """
        for event in events:
            if isinstance(event, ChildReply):
                kind, value, reason, extras = json.loads(event.body)
                value = math.nan if kind == "failed" else value
                outcome = Outcome(kind, value, reason, extras=extras)
                work.outcomes[work.asked[event.child, event.id]] = outcome
            elif numbers := [work.asked[event.child, request] for request in event.child.pending]:
                if self._is_async and len(numbers) > 1:
                    work.alone.update(numbers)
                else:
                    work.outcomes[numbers.pop(0)] = Outcome.failure(event.reason)
                work.waiting.extendleft(reversed(numbers))

    def _program(self) -> WorkerProgram:
        """Each worker has its own folder for temporary files, which its keeper removes."""
        own_function = self._spec["kind"] == "function"
        temporary = tempfile.mkdtemp(prefix="millrace-reward-")
        permissions = replace(self._permissions, writable=(*self._permissions.writable, temporary))
        bubblewrap = find_bubblewrap()
        confine = None if bubblewrap is None else partial(sandboxed, bubblewrap, permissions=permissions)
        return WorkerProgram(
            name=self._label(),
            entry="millrace.rewards.reward_worker:serve",
            settings={
                "spec": self._spec,
                "permissions": asdict(permissions),
                "concurrency": self._concurrency,
                "timeout_s": self._timeout_s,
            },
            # A user's module is looked up from the current folder first; built-in rewards must not import a
            # json.py from there.
            path=[os.getcwd(), *sys.path] if own_function else sys.path,
            environment=visible_environment(os.environ, permissions.env_vars) | {"TMPDIR": temporary},
            start_s=_START_UP_S,
            max_reply_bytes=_MAX_REPLY_BYTES,
            confine=confine,
            max_processes=_MAX_PROCESSES,
            remove=temporary,
            max_echo=_MAX_ECHO if own_function else 0,
        )

    def _label(self) -> str:
        kind = self._spec["kind"]
        return f"reward {kind} {self._spec['function']}" if kind == "function" else f"reward {kind}"
