"""Which tests a selection has, and what they may use: without `world` no processes, no ports, no sleep."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

# What starts a process. Not audit events: a hook for them is called some ten thousand times a second, since
# `id` is one of them, and cost a twentieth of the tests' time.
STARTING = (
    (subprocess.Popen, "_execute_child"),
    (BaseProcess, "start"),
    (os, "fork"),
    (os, "forkpty"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "system"),
    (os, "execv"),
    (os, "execve"),
)
MARKS = ("world", "slow", "gpu")
PARTS = 8
# By these, suites are selected with `-m`.
SELECTED = (*MARKS, "attack")
# Where this variable of the environment is set, `slow_beyond` leaves every case to the default run.
EVERY_CASE = "TESTS_EVERY_CASE"


# Files that look at every source file, which a process parses once: one worker of xdist runs them all.
SCANNING = (
    "tests/estimators/test_coverage.py",
    "tests/house/test_configuration.py",
    "tests/house/test_floors.py",
    "tests/house/test_safety.py",
    "tests/house/test_sizes.py",
    "tests/house/test_tests.py",
    "tests/house/test_words.py",
)


class NotMarkedError(Exception):
    """A test does what only one that is marked `world` may do."""


class Guard:
    """Refuse processes, ports and sleep while a test runs that is not marked for them.

    Attributes:
        test: the running test if it is watched.
        refused: what the test was refused; code may have caught the exception.
    """

    def __init__(self) -> None:
        self.test: str | None = None
        self.refused: list[str] = []

    def watch(self, item: pytest.Item | None) -> None:
        """From here on, watch a test if it has none of the marks; None watches nothing."""
        self.refused = []
        marked = item is None or any(map(item.get_closest_marker, MARKS))
        self.test = None if marked or item is None else item.nodeid

    def refuse(self, what: str) -> None:
        """Note what a watched test does.

        Raises:
            NotMarkedError: a test is watched.
        """
        if self.test is not None:
            self.refused.append(f"{self.test} {what}; mark it world, or let it do without")
            raise NotMarkedError(self.refused[-1])

    def check(self) -> None:
        """Fail the test that was refused something, whatever it made of it.

        Raises:
            NotMarkedError: it was.
        """
        if self.refused:
            raise NotMarkedError(self.refused[0])

    def refusing(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is refused to watched tests."""

        def refusing(*args: Any, **options: Any) -> Any:
            self.refuse(what)
            return original(*args, **options)

        return refusing

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put what refuses in the place of what is refused."""
        for owner, name in STARTING:
            patch.setattr(owner, name, self.refusing("starts a process", getattr(owner, name)))
        patch.setattr(time, "sleep", self.refusing("sleeps", time.sleep))
        bind = socket.socket.bind

        def binding(one: socket.socket, address: Any) -> None:
            # Else it is a path: a socket of this machine's files.
            if isinstance(address, tuple):
                self.refuse("binds a port")
            bind(one, address)

        patch.setattr(socket.socket, "bind", binding)


def drawn_as(item: pytest.Item) -> str:
    """What a draw takes as a whole: a test, or all tests of a file whose shared fixture costs most of all."""
    return item.nodeid if item.get_closest_marker("together") is None else item.nodeid.partition("::")[0]


def in_eighth(salt: str, name: str) -> bool:
    """Whether what a draw takes as a whole, by its name, is in the eighth that a salt chooses."""
    digest = hashlib.sha256(f"{salt} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % PARTS == 0


def mark_cases(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all but n cases of each test with the mark `slow_beyond(n)`; see `spread_cases`."""
    cases: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("slow_beyond") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        num = of_test[0].get_closest_marker("slow_beyond").args[0]
        kept = spread_cases([item.callspec.indices for item in of_test], num)
        for place, item in enumerate(of_test):
            if place not in kept:
                item.add_marker("slow")


def spread_cases(cases: Sequence[Mapping[str, int]], num: int) -> set[int]:
    """Choose cases, each given by the index of every parameter's value, whose values are equally frequent.

    Of parameters that are combined with each other, a value is left out only where there are more of them
    than cases to choose. Else the cases are evenly spread.
    """
    times: Counter[tuple[str, int]] = Counter()
    left = list(range(len(cases)))
    chosen: set[int] = set()

    def repeated(place: int) -> tuple[int, int, bool, int]:
        each = [times[value] for value in cases[place].items()]
        between = place > 0 and place * num // len(cases) == (place - 1) * num // len(cases)
        return sum(map(bool, each)), sum(each), between, place

    while left and len(chosen) < num:
        place = min(left, key=repeated)
        left.remove(place)
        chosen.add(place)
        times.update(cases[place].items())
    return chosen


def scope_of(name: str) -> str:
    """What a worker of xdist takes as a whole: the test's file, or all files that look at the sources."""
    file = name.partition("::")[0]
    return "sources" if file in SCANNING else file


def demanded_marks(expression: str) -> list[set[str]]:
    """The marks that a test needs to fit an expression for `-m`, as far as they are plain to see.

    One set for each alternative; a test that fits has all marks of one of them.
    """
    if re.search(r"[()]", expression):
        return [set()]
    return [
        {term for term in part.strip().split(" and ") if term.isidentifier()}
        for part in re.split(r"\bor\b", expression)
    ]


def hidden_marks(items: Iterable[pytest.Item]) -> list[str]:
    """The tests that are selected by a mark which their file does not name, each with the mark."""
    texts: dict[Path, str] = {}
    found = []
    for item in items:
        for name in SELECTED:
            if item.get_closest_marker(name) is None:
                continue
            if item.path not in texts:
                texts[item.path] = item.path.read_text(encoding="utf-8")
            if f"mark.{name}" not in texts[item.path]:
                found.append(f"{item.nodeid} ({name})")
    return found
