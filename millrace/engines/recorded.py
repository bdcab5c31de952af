"""Recorded engine commands, so that a replay sends the same commands at the same turns. No torch.

An engine is a deterministic function of its weights, its commands and the turns before which it starts them
(see `engine_worker.EngineWorker`). Each command has a one-letter code: `s` submit, `a` abort, `l` load, and
`d` for the submit of blocking requests (`engines.subprocesses.BlockingRequests`), which come from another
thread than the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Prefix of the ids of blocking requests; a number follows.
PREFIX = "direct-"
LETTERS = {"submit": "s", "abort": "a", "load": "l"}
DIRECT = "d"


class ReplayError(RuntimeError):
    """A replay diverged from its run, or a run cannot be replayed; the message names the place."""


def number_of(id: str) -> int:
    """Return the number in the id of a blocking request, from 0; ValueError for any other id."""
    return int(id.removeprefix(PREFIX))


class CommandGate:
    """Reorders the commands of one engine into the recorded order, whichever thread comes first here."""

    def __init__(self, engine: str, letters: str) -> None:
        """Take the recorded order.

        Args:
            engine: engine name.
            letters: codes of the commands that the engine started in the run, as far as recorded. After them
                only blocking requests pass.
        """
        self._engine, self._letters = engine, deque(letters)
        self._expected = deque(letter for letter in letters if letter != DIRECT)
        self._early: dict[bool, deque[Any]] = {True: deque(), False: deque()}

    def due(self, letter: str, order: Any) -> list[Any]:
        """Add a command and return all commands that may be sent now.

        Args:
            letter: code of the command.
            order: the command.

        Raises:
            ReplayError: the run sent another command here.
        """
        if letter != DIRECT:
            if not self._expected:
                # Each message of an engine lists the commands started before it. The run recorded no start of
                # this command, so no recorded message depends on it. Here it might start too early.
                return []
            if (wanted := self._expected.popleft()) != letter:
                raise ReplayError(
                    f"the replay is not the run: {self._engine} is given {letter} and took {wanted}"
                )
        self._early[letter == DIRECT].append(order)
        orders = []
        while self._letters and (early := self._early[self._letters[0] == DIRECT]):
            orders.append(early.popleft())
            self._letters.popleft()
        if not self._letters:
            orders += self._early[True]
            self._early[True].clear()
        return orders


class RecordedCommands:
    """Recorded command order per engine, and which engine served each blocking request."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Read a segment of an event log in which no engine restarts its turn counter."""
        self._took: dict[str, list[tuple[int, str]]] = {}
        self._asked: deque[tuple[str, list[int]]] = deque()
        # The engine whose response was received for each blocking request: the last one in the log.
        self._answers: dict[int, str] = {}
        for event in events:
            if event["kind"] == "took":
                self._took.setdefault(event["engine"], []).extend(map(tuple, event["orders"]))
            elif event["kind"] == "asked":
                self._asked.append((event["engine"], event["draws"]))
                self._answers.update(dict.fromkeys(event["draws"], event["engine"]))

    def turns(self, engine: str) -> list[tuple[int, int]]:
        """Return pairs (turn, number of commands that the engine started before it)."""
        return [(turn, len(letters)) for turn, letters in self._took.get(engine, ())]

    def gate(self, engine: str) -> CommandGate:
        """Return a `CommandGate` with the recorded order of an engine."""
        return CommandGate(engine, "".join(letters for _, letters in self._took.get(engine, ())))

    def ask(self, missing: Sequence[str]) -> tuple[str, list[str]]:
        """Return the engine of the next recorded blocking request, and the ids that it was asked for.

        Args:
            missing: ids of the unfinished blocking requests.

        Raises:
            ReplayError: the run asked for other ids.
        """
        engine, numbers = self._asked.popleft() if self._asked else ("", [])
        wanted = set(numbers)
        chosen = [id for id in missing if number_of(id) in wanted]
        if not chosen or len(chosen) != len(numbers):
            raise ReplayError(
                f"the replay is not the run: {len(missing)} draws are asked for whose caller waits, and the "
                f"run asked {engine or 'nobody'} for {len(numbers)}"
            )
        return engine, chosen

    def heard(self, engine: str, id: str) -> bool:
        """Whether the run received this engine's response to a blocking request, before any loss."""
        return self._answers.get(number_of(id), engine) == engine

    def open(self, engine: str, missing: Iterable[str]) -> bool:
        """Whether an engine has blocking requests ahead of it, or has yet to respond to some of these."""
        return any(asked == engine for asked, _ in self._asked) or any(
            self._answers.get(number_of(id)) == engine for id in missing
        )
