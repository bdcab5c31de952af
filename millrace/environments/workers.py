"""Environments in worker processes: a step that waits, hangs or crashes costs one episode. No torch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from millrace.config.environment_section import (
    EnvironmentConfig,
    ProgramSection,
    ToolEnvironmentConfig,
    TrlEnvironmentConfig,
    environment_name,
)
from millrace.data.functions import explain
from millrace.environments.reply_tokens import CHARACTERS_PER_TOKEN, ReplyEncoder, Tools
from millrace.environments.running_episodes import (
    CloseEpisode,
    EnvironmentReply,
    StepEnvironment,
    saved_with,
)
from millrace.errors import SetupError
from millrace.processes.child import ChildProcess, WorkerProgram
from millrace.processes.supervisor import ChildFailed, ChildLost, ChildReply, Supervisor
from millrace.processes.wake import Wake
from millrace.rewards.row_encoding import encode_row
from millrace.rewards.sandbox import visible_environment
from millrace.types import ROOT, Reply, Task

_START_UP_S = 120.0
_MAX_ECHO = 1 << 20
# Of tools, and of all else but the texts of a reply.
_MAX_OTHER_BYTES = 1 << 20
# A worker reports a late step itself; one that does not is killed after so many further seconds.
_GRACE_S = 5.0
# How often a step is repeated on another worker after its own was lost; then the step may be the cause.
_MAX_REPEATS = 1


def longest_reply_s(config: EnvironmentConfig) -> float:
    """Return the seconds after which every step was replied to, be it by a failure."""
    return (1 + _MAX_REPEATS) * (max(config.begin_s, config.step_s) + _GRACE_S + _START_UP_S)


@dataclass(slots=True, eq=False)
class _Pending:
    step: StepEnvironment
    num_repeats: int = 0
    # Whether the episode begins again before the step, since its tools are needed to read its actions.
    begins: bool = False
    # Until its worker must have replied, also where requests are refused before.
    ends_s: float = 0.0


class EnvironmentWorkers:
    """An `EnvironmentHost` of supervised worker processes; a thread of its own receives their replies.

    An episode stays on its worker. If the worker is lost, its episodes go on elsewhere from their saved
    states, and pure environments are repeated from their actions; the other episodes fail.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        encode: ReplyEncoder,
        on_reply: Callable[[EnvironmentReply], object],
        *,
        max_tokens: int,
        is_scored: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the workers and wait until the first is ready; an episode has at most `max_tokens`.

        `is_scored` is whether the recipe has rewards, too.

        Raises:
            SetupError: the environment cannot be made, or no worker starts.
        """
        self._config, self._encode, self._on_reply, self._clock = config, encode, on_reply, clock
        self._max_tokens, self._is_scored = max_tokens, is_scored
        self._max_characters = max_tokens * CHARACTERS_PER_TOKEN
        self._supervisor = Supervisor(self._program, max_restarts=3, clock=clock)
        # Lock for what follows.
        self._lock = threading.Lock()
        self._commands: list[StepEnvironment | CloseEpisode] = []
        self._closing = False
        # Used by the thread alone.
        self._pending: dict[tuple[ChildProcess, int], _Pending] = {}
        self._worker_of: dict[str, ChildProcess] = {}
        self._began_s: dict[str, float] = {}
        # Those that `begin` gave; kept only if calls are read.
        self._tools: dict[str, Tools] = {}
        self._failure = ""
        self._wake = Wake()
        try:
            self._start()
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._run, name="millrace-environments", daemon=True)
        self._thread.start()

    def execute(self, command: StepEnvironment | CloseEpisode) -> None:
        """Queue a step for the worker of its episode, or the end of an episode."""
        with self._lock:
            self._commands.append(command)
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
                commands, self._commands = self._commands, []
            try:
                while commands:
                    command = commands.pop(0)
                    if isinstance(command, StepEnvironment):
                        self._send(_Pending(command))
                    else:
                        self._close_episode(command.episode)
                for event in self._supervisor.wait(wake=self._wake.fileno()):
                    if isinstance(event, ChildReply):
                        self._replied(event)
                    else:
                        self._lost(event)
            except Exception as error:  # of a worker that cannot start, for example; every step gets a reply
                self._fail_all(f"cannot run any more: {explain(error)}")
                with self._lock:
                    self._commands = commands + self._commands

    def _send(self, pending: _Pending, *, is_repeated: bool = False) -> None:
        """Send a step to its worker, with the task if the episode is new there.

        All actions are sent if it is new there or `is_repeated`, else the newest.
        """
        step, config, now_s = pending.step, self._config, self._clock()
        left_s = self._began_s.setdefault(step.episode, now_s) + config.episode_s - now_s
        if self._failure or left_s <= 0:
            self._finish(step, self._failure or f"took longer than {config.episode_s:g} s for its episode")
            return
        reads_calls = self._encode.reads_calls
        if reads_calls and step.saved is not None and step.episode not in self._tools:
            self._tools[step.episode] = tuple(step.saved.get("tools", ()))
        pending.begins = reads_calls and bool(step.actions) and step.episode not in self._tools
        worker, task = self._worker_of.get(step.episode), None
        actions = step.actions if is_repeated else step.actions[-1:]
        if worker is None:
            worker = self._worker_of[step.episode] = self._least_loaded()
            actions = () if pending.begins else step.actions
            try:
                given = {field.name: getattr(step.task, field.name) for field in fields(Task)}
                task = given | {"row": encode_row(step.task.row)}
            except TypeError as error:
                self._finish(step, f"cannot be given the row of prompt {step.prompt.id}: it holds a {error}")
                return
        if actions:
            tools = self._tools[step.episode] if reads_calls else ()
            actions = tuple(self._encode.read(one, step.prompt, tools) for one in actions)
        timeout_s = min(config.step_s if actions else config.begin_s, left_s)
        pending.ends_s = now_s + timeout_s
        message = {
            "episode": step.episode,
            "timeout_s": timeout_s,
            "task": task,
            "actions": [asdict(one) for one in actions],
            "is_repeated": pending.begins,
            "refuses": False,
            # Not used where the episode is in progress.
            "state": None if step.saved is None or task is None else step.saved["state"],
        }
        self._request(worker, message, pending)

    def _request(self, worker: ChildProcess, message: Mapping[str, Any], pending: _Pending) -> None:
        limit_s = message["timeout_s"] + _GRACE_S + (0.0 if worker.started else _START_UP_S)
        self._pending[worker, worker.request(json.dumps(message).encode(), limit_s)] = pending

    def _least_loaded(self) -> ChildProcess:
        workers = list(self._worker_of.values())
        return min(self._supervisor.children, key=workers.count)

    def _replied(self, event: ChildReply) -> None:
        key = event.child, event.id
        if key not in self._pending:
            return
        step, found = self._pending[key].step, json.loads(event.body)
        if self._pending[key].begins and "failure" not in found:
            self._begun_again(self._pending.pop(key), found["tools"])
            return
        if failure := found.get("failure", ""):
            reply = EnvironmentReply(step.id, failure=failure)
        else:
            state = found.pop("saved")
            lists = ("messages", "tools", "token_ids")
            given = Reply(**found | {name: tuple(found[name]) for name in lists if found[name] is not None})
            is_branch = given.after is not None
            tools = given.tools if is_branch or not step.actions else self._tools.get(step.episode, ())
            if self._encode.reads_calls:
                self._tools[step.episode] = tools
            reply = replace(self._encode(step, given, tools), saved=saved_with(state, tools))
            if self._is_refused(step, reply):
                timeout_s = max(0.0, self._pending[key].ends_s - self._clock())
                message = {"episode": step.episode, "timeout_s": timeout_s, "refuses": True}
                self._request(event.child, message, self._pending.pop(key))
                return
        del self._pending[key]
        if reply.done or failure:
            self._forget(step.episode)
        elif reply.failure:  # the worker has not ended the episode
            self._close_episode(step.episode)
        self._on_reply(reply)

    def _is_refused(self, step: StepEnvironment, reply: EnvironmentReply) -> bool:
        """Whether a request of a program is refused, since its branch would have too many tokens.

        The first is not: its attempt fails. Nor is one at the last turn, which ends the episode.
        """
        is_program = isinstance(self._config, ProgramSection)
        if not is_program or reply.done or reply.failure or not 0 < len(step.actions) < step.task.max_turns:
            return False
        num_tokens = len(reply.token_ids)
        if reply.after != ROOT:
            last = step.actions[-1 if reply.after is None else reply.after]
            num_tokens += last.num_context_tokens + len(last.token_ids)
        return num_tokens >= self._max_tokens

    def _begun_again(self, pending: _Pending, tools: Tools) -> None:
        """Send all actions of an episode that began again, since its tools are known now."""
        self._tools[pending.step.episode] = tools
        self._send(pending, is_repeated=True)

    def _lost(self, event: ChildLost) -> None:
        """Start another worker; repeat the steps of the lost one there, or fail those that were late."""
        for episode in [one for one, worker in self._worker_of.items() if worker is event.child]:
            del self._worker_of[episode]
        self._supervisor.start()
        for key in [key for key in self._pending if key[0] is event.child]:
            pending = self._pending.pop(key)
            pending.num_repeats += 1
            late = event.child.pending[key[1]].deadline_s <= self._clock()
            if late or pending.num_repeats > _MAX_REPEATS:
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
        self._tools.pop(episode, None)

    def _fail_all(self, reason: str) -> None:
        """Fail every step from now on."""
        self._failure = reason
        pending = [one.step for one in self._pending.values()]
        self._pending.clear()
        for step in pending:
            self._finish(step, reason)

    # ---- processes

    def _start(self) -> None:
        for _ in range(self._config.num_workers):
            self._supervisor.start()
        try:
            while not any(worker.started for worker in self._supervisor.children):
                self._supervisor.wait()
        except ChildFailed as error:
            raise SetupError(error.refusal or str(error)) from None

    def _program(self) -> WorkerProgram:
        config, temporary = self._config, tempfile.mkdtemp(prefix="millrace-environment-")
        # A character takes up to 12 bytes of JSON; text and state are cut.
        max_reply_bytes = 24 * self._max_characters + _MAX_OTHER_BYTES
        return WorkerProgram(
            name=f"environment {environment_name(config)}",
            entry="millrace.environments.environment_worker:serve",
            settings={
                "kind": config.kind,
                "function": environment_name(config),
                "options": self._arguments(),
                "max_characters": self._max_characters,
                "max_reply_bytes": max_reply_bytes,
            },
            path=[os.getcwd(), *sys.path],
            environment=visible_environment(os.environ, config.visible_env_vars) | {"TMPDIR": temporary},
            start_s=_START_UP_S,
            max_reply_bytes=max_reply_bytes,
            overlapping=True,
            remove=temporary,
            max_echo=_MAX_ECHO,
        )

    def _arguments(self) -> dict[str, Any]:
        config, arguments = self._config, dict(self._config.arguments)
        if isinstance(config, ToolEnvironmentConfig):
            arguments |= {"max_characters": config.reply_tokens * CHARACTERS_PER_TOKEN}
        if isinstance(config, ProgramSection):
            arguments |= {"is_scored": self._is_scored, "reads_calls": self._encode.reads_calls}
            arguments |= {"num_tokens": self._encode.num_tokens}
        if isinstance(config, TrlEnvironmentConfig):
            arguments |= {"is_scored": self._is_scored}
        return arguments

    def _close_all(self) -> None:
        self._supervisor.close()
        self._wake.close()
