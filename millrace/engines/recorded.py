"""What engines were given in a run, so that another run gives them the same at the same points. No torch.

An engine does what follows from its weights and from the turns before which it took up which orders (see
`worker.Mailbox`). Orders have letters: `s` submit, `a` abort, `l` load, and `d` for a submit of
draws whose caller waits (`subprocesses.Direct`), which come from another thread than the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Of the ids of draws whose caller waits; a number follows.
PREFIX = "direct-"
LETTERS = {"submit": "s", "abort": "a", "load": "l"}
DIRECT = "d"


class ReplayError(RuntimeError):
    """A replay that is not its run, or a run that cannot be replayed; the message says where."""


def number_of(id: str) -> int:
    """Of a draw whose caller waits, counted from 0; ValueError for any other."""
    return int(id.removeprefix(PREFIX))


class Gate:
    """Lets the orders of one engine through in the order of the run, whichever thread is earlier here."""

    def __init__(self, engine: str, letters: str) -> None:
        """Nothing has come.

        Args:
            engine: its name.
            letters: of the orders that it took up in the run, as far as it is known. Of what comes after them
                only draws pass whose caller waits.
        """
        self._engine, self._letters = engine, deque(letters)
        self._expected = deque(letter for letter in letters if letter != DIRECT)
        self._early: dict[bool, deque[Any]] = {True: deque(), False: deque()}

    def due(self, letter: str, order: Any) -> list[Any]:
        """The orders that may be given once this one has come.

        Raises:
            ReplayError: the run gave another one.
        """
        if letter != DIRECT:
            if not self._expected:
                # An engine tells with each message what it took up before, so all that the run heard of it
                # came before it took this up. Here it might take it up sooner.
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


class Script:
    """What the engines of a run took up, and whom draws were asked of whose caller waits."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Read from a part of an event log in which no engine begins anew."""
        self._took: dict[str, list[tuple[int, str]]] = {}
        self._asked: deque[tuple[str, list[int]]] = deque()
        # Of each such draw the engine whose answer was heard: the last one that was asked.
        self._answers: dict[int, str] = {}
        for event in events:
            if event["kind"] == "took":
                self._took.setdefault(event["engine"], []).extend(map(tuple, event["orders"]))
            elif event["kind"] == "asked":
                self._asked.append((event["engine"], event["draws"]))
                self._answers.update(dict.fromkeys(event["draws"], event["engine"]))

    def turns(self, engine: str) -> list[tuple[int, int]]:
        """Before which turns it took up how many orders."""
        return [(turn, len(letters)) for turn, letters in self._took.get(engine, ())]

    def gate(self, engine: str) -> Gate:
        """Of its orders."""
        return Gate(engine, "".join(letters for _, letters in self._took.get(engine, ())))

    def ask(self, missing: Sequence[str]) -> tuple[str, list[str]]:
        """Whom the run asked next, and for which of these draws.

        Raises:
            ReplayError: it asked for others.
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
        """Whether the run heard what this engine says of such a draw; it may have been lost before."""
        return self._answers.get(number_of(id), engine) == engine

    def open(self, engine: str, missing: Iterable[str]) -> bool:
        """Whether an engine has yet to be asked for such draws, or to answer some of these."""
        return any(asked == engine for asked, _ in self._asked) or any(
            self._answers.get(number_of(id)) == engine for id in missing
        )
