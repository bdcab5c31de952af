"""Environments in worker processes: a step that waits, hangs or crashes costs one episode. No torch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from millrace.environments.reply_tokens import CHARACTERS_PER_TOKEN, ReplyEncoder
from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment
from millrace.errors import SetupError
from millrace.processes.child import ChildProcess, WorkerProgram
from millrace.processes.supervisor import ChildFailed, ChildLost, ChildReply, Supervisor
from millrace.processes.wake import Wake
from millrace.rewards.row_encoding import encode_row
from millrace.rewards.sandbox import visible_environment
from millrace.types import Reply, Task

_START_UP_S = 120.0
_MAX_ECHO = 1 << 20
# A worker reports a late step itself; one that does not is killed after so many further seconds.
_GRACE_S = 5.0
# How often a step is repeated on another worker after its own was lost; then the step may be the cause.
_MAX_REPEATS = 1


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What the workers run, and within which limits.

    Attributes:
        kind: see `kinds.environment_factory`, also for the next two.
        function: `module:name` of a class or function.
        options: keyword arguments.
        num_workers: processes.
        begin_s: limit of the begin of an episode.
        step_s: limit of each later step.
        episode_s: limit of an episode from its begin to its last reply, with the time of its completions.
        env_vars: environment variables that the workers see beside harmless ones.
        max_tokens: of an episode; longer replies are cut.
    """

    kind: str
    function: str
    options: Mapping[str, Any]
    num_workers: int
    begin_s: float
    step_s: float
    episode_s: float
    env_vars: tuple[str, ...]
    max_tokens: int


@dataclass(slots=True, eq=False)
class _Pending:
    step: StepEnvironment
    num_repeats: int = 0


class EnvironmentWorkers:
    """An `EnvironmentHost` of supervised worker processes; a thread of its own receives their replies.

    An episode stays on its worker. If the worker is lost, its pure environments are repeated on another one
    from their actions; the other episodes fail.
    """

    def __init__(
        self,
        settings: WorkerEnvironment,
        encode: ReplyEncoder,
        on_reply: Callable[[EnvironmentReply], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the workers and wait until the first is ready.

        Raises:
            SetupError: the environment cannot be made, or no worker starts.
        """
        self._settings, self._encode, self._on_reply, self._clock = settings, encode, on_reply, clock
        self._supervisor = Supervisor(self._program, max_restarts=3, clock=clock)
        # Lock for what follows.
        self._lock = threading.Lock()
        self._new: list[StepEnvironment] = []
        self._ended: list[str] = []
        self._closing = False
        # Used by the thread alone.
        self._pending: dict[tuple[ChildProcess, int], _Pending] = {}
        self._worker_of: dict[str, ChildProcess] = {}
        self._began_s: dict[str, float] = {}
        self._failure = ""
        self._wake = Wake()
        try:
            self._start()
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._run, name="millrace-environments", daemon=True)
        self._thread.start()

    def step(self, step: StepEnvironment) -> None:
        """Queue a step for the worker of its episode."""
        with self._lock:
            self._new.append(step)
        self._wake.set()

    def close_episode(self, episode: str) -> None:
        """Close the environment of an episode; the step that is running may end first."""
        with self._lock:
            self._ended.append(episode)
        self._wake.set()

    def close(self) -> None:
        """Kill the workers; steps in progress are not replied to."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        self._thread.join()
        self._close_all()

    # ---- the thread

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                if self._closing:
                    return
                new, self._new = self._new, []
                ended, self._ended = self._ended, []
            for episode in ended:
                self._close_episode(episode)
            for step in new:
                self._send(_Pending(step))
            try:
                events = self._supervisor.wait(wake=self._wake.fileno())
            except ChildFailed as error:
                self._fail_all(str(error))
                continue
            for event in events:
                if isinstance(event, ChildReply):
                    self._replied(event)
                else:
                    self._lost(event)

    def _send(self, pending: _Pending) -> None:
        """Send a step to its worker, with the task and all actions if the episode is new there."""
        step, settings = pending.step, self._settings
        now_s = self._clock()
        left_s = self._began_s.setdefault(step.episode, now_s) + settings.episode_s - now_s
        if self._failure or left_s <= 0:
            self._finish(step, self._failure or f"the episode took longer than {settings.episode_s:g} s")
            return
        worker, task, actions = self._worker_of.get(step.episode), None, step.actions[-1:]
        if worker is None:
            worker = self._worker_of[step.episode] = self._least_loaded()
            actions = step.actions
            try:
                given = {field.name: getattr(step.task, field.name) for field in fields(Task)}
                task = given | {"row": encode_row(step.task.row)}
            except TypeError as error:
                self._finish(step, f"cannot be given the row of prompt {step.prompt.id}: it holds a {error}")
                return
        timeout_s = min(settings.step_s if step.actions else settings.begin_s, left_s)
        message = {
            "episode": step.episode,
            "timeout_s": timeout_s,
            "task": task,
            "actions": [[one.text, one.token_ids, one.finish_reason] for one in actions],
        }
        limit_s = timeout_s + _GRACE_S + (0.0 if worker.started else _START_UP_S)
        self._pending[worker, worker.request(json.dumps(message).encode(), limit_s)] = pending

    def _least_loaded(self) -> ChildProcess:
        workers = list(self._worker_of.values())
        return min(self._supervisor.children, key=workers.count)

    def _replied(self, event: ChildReply) -> None:
        pending = self._pending.pop((event.child, event.id), None)
        if pending is None:
            return
        found = json.loads(event.body)
        if failure := found.get("failure", ""):
            self._finish(pending.step, failure)
            return
        reply = Reply(**found)
        if reply.done:
            self._forget(pending.step.episode)
        self._on_reply(self._encode(pending.step, reply))

    def _lost(self, event: ChildLost) -> None:
        """Start another worker; repeat the steps of the lost one there, or fail them."""
        for episode in [one for one, worker in self._worker_of.items() if worker is event.child]:
            del self._worker_of[episode]
        try:
            self._supervisor.start()
        except OSError as error:
            self._fail_all(f"cannot start a worker: {error}")
        for key in [key for key in self._pending if key[0] is event.child]:
            pending = self._pending.pop(key)
            pending.num_repeats += 1
            if event.late or pending.num_repeats > _MAX_REPEATS:
                self._finish(pending.step, event.reason)
            else:
                self._send(pending)

    def _close_episode(self, episode: str) -> None:
        for key in [key for key, pending in self._pending.items() if pending.step.episode == episode]:
            del self._pending[key]
            key[0].cancel(key[1])
        worker = self._worker_of.get(episode)
        self._forget(episode)
        if worker is not None:
            worker.notify(json.dumps({"closed": episode}).encode())

    def _finish(self, step: StepEnvironment, failure: str) -> None:
        self._forget(step.episode)
        self._on_reply(EnvironmentReply(step.id, failure=failure))

    def _forget(self, episode: str) -> None:
        self._worker_of.pop(episode, None)
        self._began_s.pop(episode, None)

    def _fail_all(self, reason: str) -> None:
        """Fail every step from now on: no worker can be started."""
        self._failure = reason
        pending = [one.step for one in self._pending.values()]
        self._pending.clear()
        for step in pending:
            self._finish(step, reason)

    # ---- processes

    def _start(self) -> None:
        for _ in range(self._settings.num_workers):
            self._supervisor.start()
        try:
            while not any(worker.started for worker in self._supervisor.children):
                self._supervisor.wait()
        except ChildFailed as error:
            raise SetupError(error.refusal or str(error)) from None

    def _program(self) -> WorkerProgram:
        settings, temporary = self._settings, tempfile.mkdtemp(prefix="millrace-environment-")
        return WorkerProgram(
            name=f"environment {settings.function or settings.kind}",
            entry="millrace.environments.environment_worker:serve",
            settings={
                "kind": settings.kind,
                "function": settings.function,
                "options": dict(settings.options),
                "max_characters": settings.max_tokens * CHARACTERS_PER_TOKEN,
            },
            path=[os.getcwd(), *sys.path],
            environment=visible_environment(os.environ, settings.env_vars) | {"TMPDIR": temporary},
            start_s=_START_UP_S,
            max_reply_bytes=settings.max_tokens * CHARACTERS_PER_TOKEN * 8 + (1 << 16),
            overlapping=True,
            remove=temporary,
            max_echo=_MAX_ECHO,
        )

    def _close_all(self) -> None:
        self._supervisor.close()
        self._wake.close()
