"""The environment `program`: an agent program that calls the policy as an OpenAI-compatible API. No torch."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from millrace.environments import program_launcher
from millrace.environments.agent_http import AgentServer
from millrace.environments.agent_session import (
    AgentSession,
    HttpRequest,
    HttpResponse,
    ended,
    printed_reward,
)
from millrace.environments.program_launcher import PORT, launch_command
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.sandbox import seccomp
from millrace.environments.sandbox.server_sandbox import (
    FOLDER,
    MODULES,
    required_bubblewrap,
    system_mounts,
)
from millrace.keeper import keeper_command
from millrace.observability.plain import plain_text
from millrace.processes import worker
from millrace.processes.bubblewrap import ISOLATION, without_user_namespaces
from millrace.types import Action, Reply, Task

# What of a program's output is kept: its end.
_TAIL_BYTES = 64 << 10
_MAX_REASON = 300
# The kernel's limit of one environment variable is 128 KiB.
_MAX_TASK_BYTES = 100_000
_FOLDER_BYTES = 256 << 20
_CLOSE_S = 10.0
_PYTHONS = ("python", "python3")
_ROOT = str(Path(__file__).resolve().parents[2])


class Programs:
    """What all episodes of a worker share: the command, and the proxy, which starts with the first."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        sandbox: str = "bubblewrap",
        model_name: str = "policy",
        task_columns: Sequence[str] = (),
        readable: Sequence[str] = (),
        max_branches: int = 16,
        is_scored: bool = False,
        reads_calls: bool = False,
        num_tokens: int = 0,
    ) -> None:
        """Take the settings of a recipe; see `config.environment_section.EnvironmentConfig`.

        `is_scored` is whether the recipe has rewards, so that the program need not report one; `reads_calls`
        is whether tool calls are read from completions, and `num_tokens` the size of the vocabulary.

        Raises:
            SandboxError: programs cannot be isolated here.
            ValueError: there is no such command, or a path to be shown.
        """
        self.command = _resolved(command)
        self.model_name, self.task_columns, self.is_scored = model_name, tuple(task_columns), is_scored
        self._session = partial(
            AgentSession, reads_calls=reads_calls, num_tokens=num_tokens, max_branches=max_branches
        )
        self._bubblewrap = required_bubblewrap() if sandbox == "bubblewrap" else ""
        self._files = _shown_files(self.command, readable) if self._bubblewrap else []
        self._sessions: dict[str, AgentSession] = {}
        self._num_sessions = 0
        self._server: AgentServer | None = None
        self._starting = asyncio.Lock()
        self._port, self._socket = 0, ""

    @property
    def is_confined(self) -> bool:
        """Whether programs run in bubblewrap."""
        return bool(self._bubblewrap)

    async def open(self) -> AgentSession:
        """Return the session of a new episode."""
        await self._start()
        self._num_sessions += 1
        key, name = secrets.token_urlsafe(32), str(self._num_sessions)
        session = self._session(key, self.model_name, name)
        self._sessions[session.name] = session
        return session

    def url_of(self, session: AgentSession) -> str:
        """Return the URL of an episode, which is followed by `/v1`."""
        return f"http://127.0.0.1:{PORT if self.is_confined else self._port}/e/{session.name}"

    def program(self, task: Task, session: AgentSession) -> EpisodeProgram:
        """Return the program of a new episode, which is not started.

        Raises:
            EnvironmentFailed: the row of the task lacks a column, or is too large.
        """
        missing = [name for name in self.task_columns if name not in task.row]
        if missing:
            raise EnvironmentFailed(f"has no column {missing[0]} in its row, which task_columns names")
        row = {name: task.row[name] for name in self.task_columns}
        given = {"prompt": task.prompt, "seed": task.seed, "max_turns": task.max_turns, "row": row}
        written, base_url = json.dumps(given), self.url_of(session)
        if len(written) > _MAX_TASK_BYTES:
            raise EnvironmentFailed(
                f"cannot give the program its task: it has {len(written)} bytes, and may have "
                f"{_MAX_TASK_BYTES}; name fewer columns in environment.task_columns"
            )
        variables = {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": session.key,
            "OPENAI_MODEL": self.model_name,
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": session.key,
            "ANTHROPIC_MODEL": self.model_name,
            "MILLRACE_URL": base_url,
            "MILLRACE_TASK": written,
        }
        return RunningProgram(self, variables)

    def forget(self, session: AgentSession) -> None:
        """End a session; its requests are refused from now on."""
        session.end()
        self._sessions.pop(session.name, None)

    async def close(self) -> None:
        """Close the proxy."""
        if self._server is not None:
            await self._server.close()
        if self._socket:
            shutil.rmtree(os.path.dirname(self._socket), ignore_errors=True)

    def confined(self) -> list[str]:
        """Return the command line of one program under its limits."""
        python = os.path.realpath(sys.executable)
        if not self.is_confined:
            return launch_command(python, _ROOT, "", self.command)
        modules = (worker, seccomp, program_launcher)
        shown = [word for path in (*self._files, self._socket) for word in ("--ro-bind", path, path)]
        mounts = system_mounts(python, _FOLDER_BYTES, modules, [*shown, "--dir", os.getcwd()])
        arguments = [*ISOLATION, *without_user_namespaces(self._bubblewrap), "--hostname", "sandbox", *mounts]
        launch = launch_command(python, MODULES, self._socket, self.command)
        return [self._bubblewrap, *arguments, "--chdir", os.getcwd(), "--", *launch]

    async def _start(self) -> None:
        async with self._starting:
            if self._server is not None:
                return
            server = AgentServer(self._handle)
            if self.is_confined:
                self._socket = os.path.join(tempfile.mkdtemp(prefix="millrace-"), "proxy")
                await server.listen_at(self._socket)
            else:
                self._port = await server.listen()
            self._server = server

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        empty, e, name, path = [*request.path.split("/", 3), "", "", ""][:4]
        if empty or e != "e" or name not in self._sessions:
            raise ended()
        return await self._sessions[name].handle(request, f"/{path}")


class ProgramEnvironment:
    """One episode of a program: each of its requests is answered by a completion of the policy."""

    pure = False

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._program: EpisodeProgram | None = None
        self._session: AgentSession | None = None

    async def begin(self, task: Task) -> Reply:
        """Start the program, and return its first request."""
        self._session = await self._programs.open()
        self._program = self._programs.program(task, self._session)
        await self._program.start()
        reply = await self._next()
        if reply.done:
            raise EnvironmentFailed(f"made no request: {reply.invalid or 'the program ended'}")
        return reply

    async def step(self, action: Action) -> Reply:
        """Answer the request of the last reply, and return the next one, or the end of the program."""
        assert self._session is not None
        self._session.answer(action)
        return await self._next()

    async def refuse(self) -> Reply:
        """Refuse the request of the last reply, and return the next one, or the end of the program."""
        assert self._session is not None
        self._session.refuse()
        return await self._next()

    async def close(self) -> None:
        """Kill the program and all that it started."""
        if self._session is not None:
            self._programs.forget(self._session)
        if self._program is not None:
            await self._program.close()

    async def _next(self) -> Reply:
        """Wait for the program's next request, or for its end, after which no request is answered."""
        assert self._session is not None and self._program is not None
        asking = asyncio.ensure_future(self._session.next_reply())
        ending = asyncio.ensure_future(self._program.ended())
        try:
            await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return self._session.counted(self._end(ending.result()))
            return asking.result()
        finally:
            asking.cancel()
            ending.cancel()

    def _end(self, end: ProgramEnd) -> Reply:
        """Return the end of an episode whose program has ended."""
        assert self._session is not None
        reward = end.reward if self._session.reward is None else self._session.reward
        if reward is not None:
            return Reply(done=True, score=reward)
        if end.code == 0 and self._programs.is_scored:
            return Reply(done=True)
        if end.code == 0:
            return Reply(
                done=True,
                invalid='the program ended without a reward: it neither printed {"reward": x} as its last '
                "line nor posted one",
            )
        reason = plain_text(end.error, _MAX_REASON) or "it wrote nothing to standard error"
        how = f"exit code {end.code}" if end.code > 0 else f"signal {-end.code}"
        return Reply(done=True, invalid=f"the program ended with {how}: {reason}")


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program: its exit code, negative for a signal, the reward it printed, its last error."""

    code: int
    reward: float | None
    error: str


class EpisodeProgram(Protocol):
    """The program of an episode."""

    async def start(self) -> None:
        """Start it."""

    async def ended(self) -> ProgramEnd:
        """Wait until it has ended with all its output; may be called again after it was cancelled."""

    async def close(self) -> None:
        """End it."""


class RunningProgram:
    """A running program under a keeper, which kills all that it started when it ends.

    `max_processes` and `stdin` are what it is started with.
    """

    max_processes = 256
    stdin = asyncio.subprocess.DEVNULL

    def __init__(self, programs: Programs, variables: Mapping[str, str]) -> None:
        """Take the variables that it sees beside the worker's own."""
        self._programs, self._variables = programs, variables
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline = -1
        self._tails = [b"", b""]
        self._reading: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start it."""
        is_confined = self._programs.is_confined
        folder = tempfile.mkdtemp(prefix="millrace-program-")
        read_end, self._lifeline = os.pipe()
        command = keeper_command(
            read_end,
            self._programs.confined(),
            remove=folder,
            codes="shell" if is_confined else "own",
            most=self.max_processes,
        )
        place = {"HOME": FOLDER, "TMPDIR": FOLDER} if is_confined else {"TMPDIR": folder}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=self.stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**_inherited(is_confined), **self._variables, **place},
                pass_fds=(read_end,),
                start_new_session=True,
            )
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(read_end)
        streams = (self._process.stdout, self._process.stderr)
        for number, stream in enumerate(streams):
            assert stream is not None
            self._reading.append(asyncio.ensure_future(self._read(number, stream)))

    async def _read(self, number: int, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_TAIL_BYTES):
            self._tails[number] = (self._tails[number] + data)[-_TAIL_BYTES:]

    async def ended(self) -> ProgramEnd:
        """Wait until it has ended with all its output."""
        assert self._process is not None
        await asyncio.gather(*(asyncio.shield(one) for one in self._reading))
        code = await self._process.wait()
        return ProgramEnd(code, printed_reward(self._last(0)), self.last_error)

    @property
    def last_error(self) -> str:
        """The last line of its standard error."""
        return self._last(1)

    def _last(self, number: int) -> str:
        return self._tails[number].decode("utf-8", "replace").strip().rpartition("\n")[2].strip()

    async def close(self) -> None:
        """Let the keeper kill it and all that it started, and wait for that."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._process is not None:
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        for reading in self._reading:
            reading.cancel()


def _inherited(is_confined: bool) -> dict[str, str]:
    """The worker's variables; a sandbox without a network has no certificates to point to."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (is_confined and name.startswith("SSL_CERT_"))
    }


def _resolved(command: Sequence[str]) -> list[str]:
    """The command with the path of its program; `python` is the interpreter that runs millrace."""
    if command[0] in _PYTHONS:
        return [sys.executable, *command[1:]]
    path = shutil.which(command[0])
    if path is None:
        raise ValueError(f"there is no program {command[0]}; correct environment.command")
    return [os.path.abspath(path), *command[1:]]


def _shown_files(command: Sequence[str], readable: Sequence[str]) -> list[str]:
    """What a sandbox shows of the host beside its system: files that the command names, and the recipe."""
    missing = [path for path in readable if not os.path.exists(path)]
    if missing:
        raise ValueError(f"there is no {missing[0]}; correct environment.readable")
    named = [word for word in command[1:] if os.path.exists(word)]
    shown = [command[0], *named, *readable]
    if sys.prefix != sys.base_prefix:
        shown.append(sys.prefix)
    return list(dict.fromkeys(os.path.abspath(path) for path in shown))
