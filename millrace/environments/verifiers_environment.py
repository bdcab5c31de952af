"""The environment `verifiers`: tasks of prime-rl's library, played in a Python of its own. No torch.

A worker has one process of verifiers, which plays all its episodes through the proxy of `program`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from millrace.data.rows import DataError
from millrace.environments.agent_session import AgentSession, reward_of
from millrace.environments.program import (
    EpisodeProgram,
    ProgramEnd,
    ProgramEnvironment,
    Programs,
    RunningProgram,
)
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.sandbox.execution import SandboxError
from millrace.errors import SetupError
from millrace.observability.plain import plain_text
from millrace.protocols import Environment
from millrace.rewards.sandbox import visible_environment
from millrace.types import Task

# Until an environment is made as a test, and until its tasks are listed, in seconds.
CHECK_S, ROWS_S = 100.0, 600.0
_MAX_REASON = 500
_PROGRAM = str(Path(__file__).with_name("verifiers_program.py"))


class VerifiersPrograms(Programs):
    """What all episodes of a worker share: the proxy, and the process that plays them."""

    _player: VerifiersPlayer | None = None

    async def player(self) -> VerifiersPlayer:
        """Return the process, which is started if it does not run."""
        async with self._starting:
            if self._player is not None and self._player.has_ended:
                await self._player.close()
                self._player = None
            if self._player is None:
                player = VerifiersPlayer(self)
                try:
                    await player.start()
                except BaseException:
                    await player.close()
                    raise
                self._player = player
            return self._player

    def program(self, task: Task, session: AgentSession) -> EpisodeProgram:
        """Return an episode of the process, in the place of a program of its own."""
        found = task.row.get("task")
        if not isinstance(found, Mapping):
            raise EnvironmentFailed(
                "has no object in the column task of its row; set data.train to environment"
            )
        given = {"url": f"{self.url_of(session)}/v1", "key": session.key, "model": self.model_name}
        return _PlayedEpisode(self, {**given, "task": found})

    async def close(self) -> None:
        """End the process, and close the proxy."""
        if self._player is not None:
            await self._player.close()
        await super().close()


class VerifiersPlayer(RunningProgram):
    """The process of verifiers, whose lines on stdin are episodes, and on stdout their rewards."""

    max_processes = 4096
    stdin = asyncio.subprocess.PIPE

    def __init__(self, programs: Programs) -> None:
        super().__init__(programs, {})
        self._results: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._numbers = count(1)
        self.has_ended = False

    def play(self, given: Mapping[str, Any]) -> tuple[int, asyncio.Future[Mapping[str, Any]]]:
        """Begin an episode; return its number and what will be its result."""
        id = next(self._numbers)
        result = self._results[id] = asyncio.get_running_loop().create_future()
        self._send({"id": id, **given})
        return id, result

    def stop(self, id: int) -> None:
        """End an episode, if it has not ended."""
        if self._results.pop(id, None) is not None:
            self._send({"id": id})

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _read(self, number: int, stream: asyncio.StreamReader) -> None:
        if number != 0:
            await super()._read(number, stream)
            return
        try:
            async for line in stream:
                found = json.loads(line)
                if (result := self._results.pop(found.pop("id"), None)) is not None:
                    result.set_result(found)
            await asyncio.gather(*self._reading[1:])
        finally:
            self.has_ended = True
            for result in self._results.values():
                result.set_result({"failure": f"the process of verifiers ended: {self.last_error}"})
            self._results.clear()


class _PlayedEpisode:
    """The `EpisodeProgram` of an episode of the process."""

    def __init__(self, programs: VerifiersPrograms, given: Mapping[str, Any]) -> None:
        self._programs, self._given = programs, given
        self._stop: Callable[[], None] | None = None

    async def start(self) -> None:
        player = await self._programs.player()
        id, self._result = player.play(self._given)
        self._stop = partial(player.stop, id)

    async def ended(self) -> ProgramEnd:
        found = await asyncio.shield(self._result)
        reward = reward_of(found)
        if reward is None:
            raise EnvironmentFailed(f"failed: {plain_text(str(found.get('failure')), _MAX_REASON)}")
        return ProgramEnd(0, reward, "")

    async def close(self) -> None:
        if self._stop is not None:
            self._stop()


def verifiers_factory(
    id: str, *, python: str, options: Mapping[str, Any], readable: Sequence[str], **given: Any
) -> Callable[[], Environment]:
    """Return what makes an episode, after the environment was made once as a test.

    `id` and `options` are as verifiers has them, and the others as `Programs` does.

    Raises:
        SetupError: the environment cannot be made, or the process cannot be isolated.
    """
    (line,) = _lines("check", CHECK_S, id, python, options)
    found = json.loads(line)
    # The interpreter itself, where `python` is a script that chooses one.
    command = _command("play", id, found["python"], options)
    try:
        programs = VerifiersPrograms(command, readable=[*readable, *found["installed"]], **given)
    except (SandboxError, ValueError) as error:
        raise SetupError(f"environment verifiers {id}: {error}") from error
    return lambda: ProgramEnvironment(programs)


def verifiers_rows(
    number: int,
    seed: int,
    *,
    id: str,
    python: str,
    options: Mapping[str, Any],
    env_vars: Sequence[str],
    **given: Any,
) -> Iterator[dict[str, Any]]:
    """Yield the first tasks as rows; DataError if there are none."""
    shown = visible_environment(os.environ, env_vars)
    lines = _lines("rows", ROWS_S, id, python, options, str(number), environment=shown)
    if not lines:
        raise DataError(f"environment verifiers {id} has no tasks")
    yield from map(json.loads, lines)


def _command(how: str, id: str, python: str, options: Mapping[str, Any]) -> list[str]:
    path = shutil.which(python)
    if path is None:
        raise SetupError(f"environment verifiers {id}: there is no {python}; correct environment.python")
    # Without -P, files beside the program would hide modules of the same names.
    return [os.path.abspath(path), "-P", _PROGRAM, how, json.dumps({"id": id, "options": options})]


def _lines(
    how: str,
    limit_s: float,
    id: str,
    python: str,
    options: Mapping[str, Any],
    *more: str,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """What the program prints; SetupError with the last line of its standard error if it fails."""
    command = [*_command(how, id, python, options), *more]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"environment verifiers {id} was not ready after {limit_s:g} s") from None
    except OSError as error:
        raise SetupError(f"environment verifiers {id}: {python} does not start: {error}") from error
    if found.returncode:
        reason = plain_text(found.stderr.strip().rpartition("\n")[2], _MAX_REASON)
        raise SetupError(f"environment verifiers {id} cannot be made: {reason}")
    return found.stdout.splitlines()
