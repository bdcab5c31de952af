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
from pathlib import Path
from typing import Any

from millrace.data.rows import DataError
from millrace.environments.program import TASK, ProgramEnvironment, Programs, RunningProgram
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.sandbox.execution import SandboxError
from millrace.errors import SetupError
from millrace.observability.plain import plain_text
from millrace.protocols import Environment
from millrace.types import Task

# Until an environment is made as a test, and until its tasks are listed, in seconds.
CHECK_S, ROWS_S = 100.0, 600.0
_MAX_REASON = 500
_PROGRAM = str(Path(__file__).with_name("verifiers_program.py"))


class VerifiersPrograms(Programs):
    """What all episodes of a worker share: the proxy, and the process that plays them."""

    def __init__(self, command: Sequence[str], **given: Any) -> None:
        """Take the command of the process, and what `Programs` takes."""
        super().__init__(command, **given)
        self._player: VerifiersPlayer | None = None
        self._choosing = asyncio.Lock()

    async def player(self) -> VerifiersPlayer:
        """Return the process, which is started if it does not run."""
        async with self._choosing:
            if self._player is None or self._player.has_ended:
                self._player = VerifiersPlayer()
                await self._player.start(self, {})
            return self._player

    def task_of(self, task: Task) -> Mapping[str, Any]:
        """Return the task as verifiers wrote it."""
        if not isinstance(task.row.get("task"), Mapping):
            raise EnvironmentFailed(
                "has no object in the column task of its row; set data.train to environment, or write rows that "
                "have it"
            )
        return task.row["task"]

    def program(self) -> RunningProgram:
        """Return an episode of the process, in the place of a program of its own."""
        return _PlayedEpisode(self)

    async def close(self) -> None:
        """End the process, and close the proxy."""
        if self._player is not None:
            await self._player.close()
        await super().close()


class VerifiersPlayer(RunningProgram):
    """The process of verifiers, whose lines on stdin are episodes, and on stdout their rewards."""

    max_processes = 4096
    stdin = asyncio.subprocess.PIPE

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._num_episodes = 0
        self.has_ended = False

    def play(self, given: Mapping[str, Any]) -> tuple[int, asyncio.Future[Mapping[str, Any]]]:
        """Begin an episode; return its number and what will be its result."""
        self._num_episodes += 1
        id = self._num_episodes
        result = self._results[id] = asyncio.get_running_loop().create_future()
        self._send({"id": id, **given})
        return id, result

    def stop(self, id: int) -> None:
        """End an episode, if it has not ended."""
        if self._results.pop(id, None) is not None and not self.has_ended:
            self._send({"id": id})

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _read(self, number: int, stream: asyncio.StreamReader) -> None:
        if number != 0:
            await super()._read(number, stream)
            return
        async for line in stream:
            found = json.loads(line)
            if (result := self._results.pop(found.pop("id"), None)) is not None:
                result.set_result(found)
        self.has_ended = True
        await asyncio.gather(*self._reading[1:])
        for result in self._results.values():
            result.set_result({"failure": f"the process of verifiers ended: {self.last_error}"})
        self._results.clear()


class _PlayedEpisode(RunningProgram):
    """An episode of the process."""

    def __init__(self, programs: VerifiersPrograms) -> None:
        super().__init__()
        self._programs, self._line = programs, ""
        self._stop: Callable[[], None] | None = None

    async def start(self, programs: Programs, variables: Mapping[str, str]) -> None:
        """Begin it; the process reads the task from a line."""
        player = await self._programs.player()
        given = {"url": variables["OPENAI_BASE_URL"], "key": variables["OPENAI_API_KEY"]}
        given |= {"model": programs.model_name}
        id, self._result = player.play({**given, "task": json.loads(variables[TASK])})
        self._stop = lambda: player.stop(id)

    async def ended(self) -> int:
        """Wait for the reward; EnvironmentFailed if there is none."""
        found = await asyncio.shield(self._result)
        if "reward" not in found:
            raise EnvironmentFailed(f"failed: {plain_text(str(found.get('failure')), _MAX_REASON)}")
        self._line = json.dumps(found)
        return 0

    @property
    def last_line(self) -> str:
        """The reward as a program prints it."""
        return self._line

    async def close(self) -> None:
        """End it, if it has not ended."""
        if self._stop is not None:
            self._stop()


def verifiers_factory(
    id: str, *, python: str, options: Mapping[str, Any], readable: Sequence[str], **given: Any
) -> Callable[[], Environment]:
    """Return what makes an episode, after the environment was made once as a test.

    Args:
        id: of the taskset.
        python: that has verifiers.
        options: of the environment, as verifiers has them in its table `env`.
        readable: what the process may read in bubblewrap.
        given: further settings of `Programs`.

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
    count: int, seed: int, *, id: str, python: str, options: Mapping[str, Any], **given: Any
) -> Iterator[dict[str, Any]]:
    """Yield the first `count` tasks as rows; DataError if there are none."""
    lines = _lines("rows", ROWS_S, id, python, options, str(count))
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
    how: str, limit_s: float, id: str, python: str, options: Mapping[str, Any], *more: str
) -> list[str]:
    """What the program prints; SetupError with the last line of its standard error if it fails."""
    command = [*_command(how, id, python, options), *more]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(f"environment verifiers {id} was not ready after {limit_s:g} s") from None
    except OSError as error:
        raise SetupError(f"environment verifiers {id}: {python} does not start: {error}") from error
    if found.returncode:
        reason = plain_text(found.stderr.strip().rpartition("\n")[2], _MAX_REASON)
        raise SetupError(f"environment verifiers {id} cannot be made: {reason}")
    return found.stdout.splitlines()
