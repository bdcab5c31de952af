"""Recorded engine commands, so that a replay sends the same commands at the same turns. No torch.

An engine is a deterministic function of its weights, its commands and the turns before which it starts them
(see `engine_worker.EngineWorker`). The recorded commands are `submit`, `abort`, `load`, and `blocking_submit`
for blocking requests (`engines.subprocesses.BlockingRequests`), which come from another thread than the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Prefix of the ids of blocking requests; a number follows.
PREFIX = "blocking-"
RECORDED = ("submit", "abort", "load")
BLOCKING_SUBMIT = "blocking_submit"


class ReplayError(RuntimeError):
    """A replay diverged from its run, or a run cannot be replayed; the message names the place."""


def request_number(id: str) -> int:
    """Return the number in the id of a blocking request, from 0; ValueError for any other id."""
    return int(id.removeprefix(PREFIX))


class CommandGate:
    """Reorders the commands of one engine into the recorded order, whichever thread comes first here."""

    def __init__(self, engine: str, commands: Sequence[str]) -> None:
        """Take the recorded order.

        Args:
            engine: engine name.
            commands: those that the engine started in the run, as far as recorded. After them only blocking
                requests pass.
        """
        self._engine, self._commands = engine, deque(commands)
        self._expected = deque(command for command in commands if command != BLOCKING_SUBMIT)
        self._early: dict[bool, deque[Any]] = {True: deque(), False: deque()}

    def due(self, command: str, payload: Any) -> list[Any]:
        """Add a command and return all commands that may be sent now.

        Args:
            command: its name.
            payload: the frame to send.

        Raises:
            ReplayError: the run sent another command here.
        """
        if command != BLOCKING_SUBMIT:
            if not self._expected:
                # Each message of an engine lists the commands started before it. The run recorded no start of
                # this command, so no recorded message depends on it. Here it might start too early.
                return []
            if (expected := self._expected.popleft()) != command:
                raise ReplayError(
                    f"the replay is not the run: {self._engine} gets {command} and started {expected}"
                )
        self._early[command == BLOCKING_SUBMIT].append(payload)
        passed = []
        while self._commands and (early := self._early[self._commands[0] == BLOCKING_SUBMIT]):
            passed.append(early.popleft())
            self._commands.popleft()
        if not self._commands:
            passed += self._early[True]
            self._early[True].clear()
        return passed


class RecordedCommands:
    """Recorded command order per engine, and which engine served each blocking request."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Read a segment of an event log in which no engine restarts its turn counter."""
        self._started: dict[str, list[tuple[int, list[str]]]] = {}
        self._requests: deque[tuple[str, list[int]]] = deque()
        # The engine whose response was received for each blocking request: the last one in the log.
        self._served: dict[int, str] = {}
        for event in events:
            if event["kind"] == "commands_started":
                self._started.setdefault(event["engine"], []).extend(map(tuple, event["commands"]))
            elif event["kind"] == "blocking_request":
                self._requests.append((event["engine"], event["requests"]))
                self._served.update(dict.fromkeys(event["requests"], event["engine"]))

    def turns(self, engine: str) -> list[tuple[int, int]]:
        """Return pairs (turn, number of commands that the engine started before it)."""
        return [(turn, len(commands)) for turn, commands in self._started.get(engine, ())]

    def gate(self, engine: str) -> CommandGate:
        """Return a `CommandGate` with the recorded order of an engine."""
        return CommandGate(
            engine, [name for _, commands in self._started.get(engine, ()) for name in commands]
        )

    def next_blocking(self, missing: Sequence[str]) -> tuple[str, list[str]]:
        """Return the engine of the next recorded blocking request, and the ids that it got.

        Args:
            missing: ids of the unfinished blocking requests.

        Raises:
            ReplayError: the run submitted other ids.
        """
        engine, numbers = self._requests.popleft() if self._requests else ("", [])
        expected = set(numbers)
        chosen = [id for id in missing if request_number(id) in expected]
        if not chosen or len(chosen) != len(numbers):
            raise ReplayError(
                f"the replay is not the run: {len(missing)} blocking requests are unfinished, and the run "
                f"submitted {len(numbers)} to {engine or 'no engine'}"
            )
        return engine, chosen

    def was_received(self, engine: str, id: str) -> bool:
        """Whether the run received this engine's response to a blocking request, before any loss."""
        return self._served.get(request_number(id), engine) == engine

    def is_pending(self, engine: str, missing: Iterable[str]) -> bool:
        """Whether an engine has blocking requests ahead of it, or has yet to respond to some of these."""
        return any(name == engine for name, _ in self._requests) or any(
            self._served.get(request_number(id)) == engine for id in missing
        )
