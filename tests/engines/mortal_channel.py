"""A worker's end of its connection, at whose frames it may die: in a thread, or as a process by SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from millrace.engines import engine_worker
from millrace.engines.prefill_decode_handle import ROLE_COMMANDS
from millrace.engines.wire import Channel, Frame, HasFileno, serialized
from millrace.processes.worker import START

# Frames that are no part of a transfer.
OTHERS = ("ready", "weights_loaded", "update_weights", "pause", "resume", "ping", "answered", "heartbeat")
# Environment variable with the folder of `Order`.
VARIABLE = "MILLRACE_DEATHS"


class Deaths(Protocol):
    """When a worker dies."""

    def is_at(self, point: str) -> bool:
        """Whether it dies at this point, such as `before pieces`, which it has reached."""
        ...

    def die(self) -> None:
        """Die; it does not return."""
        ...


class Mortal(Channel):
    """The channel of a worker that may die before, within and after each frame of a transfer."""

    def __init__(self, connection: socket.socket, key: bytes, deaths: Deaths) -> None:
        super().__init__(connection, key, ROLE_COMMANDS)
        self._deaths = deaths

    def wait(self, timeout_s: float | None, also: Sequence[HasFileno] = ()) -> Any:
        """The commands, one by one, so that the worker may die between two of them."""
        return self._each(super().wait(timeout_s, also))

    def _each(self, frames: list[Frame]) -> Iterator[Frame]:
        for frame in frames:
            if frame.kind in OTHERS:
                yield frame
                continue
            self._reach(f"before {frame.kind}")
            yield frame
            self._reach(f"after {frame.kind}")

    def send(
        self,
        kind: str,
        metadata: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        if kind in OTHERS:
            super().send(kind, metadata, arrays)
            return
        self._reach(f"before {kind}")
        if self._deaths.is_at(f"within {kind}"):
            self._send_half(kind, metadata, arrays)
            self._deaths.die()
        super().send(kind, metadata, arrays)
        self._reach(f"after {kind}")

    def _reach(self, point: str) -> None:
        if self._deaths.is_at(point):
            self._deaths.die()

    def _send_half(self, kind: str, metadata: Mapping[str, Any] | None, arrays: Any) -> None:
        self.queue(START, *serialized(kind, metadata or {}, arrays or {}))
        whole = b"".join(self._outgoing)
        self._outgoing.clear()
        self._outgoing.append(memoryview(whole[: len(whole) // 2]))
        self.flush()


# ---- processes


class Order:
    """In the test: which worker process dies in the next round, and what workers passed in it.

    Workers read it where they have the variables of `environment`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        root = Path(__file__).parents[2]
        text = "from tests.engines.mortal_channel import install\n\ninstall()\n"
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
        self.environment = {"PYTHONPATH": f"{folder}{os.pathsep}{root}", VARIABLE: str(folder)}

    def begin(self, role: str, point: str) -> None:
        """Begin a round in which the first worker of a role that reaches a point dies; none if empty."""
        self._number += 1
        aside = self._folder / "aside"
        aside.write_text(json.dumps([self._number, role, point]), encoding="utf-8")
        aside.replace(self._folder / "order")

    def passed(self, role: str) -> list[str]:
        """The points that the workers of a role have passed in this round, in order."""
        path = self._folder / f"passed-{self._number}-{role}"
        return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []

    @property
    def has_died(self) -> bool:
        """Whether one died in this round."""
        return (self._folder / f"dead-{self._number}").exists()


class _OrderedDeaths:
    """In a worker process: the current round of its `Order`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number, self._role = folder, 0, ""
        self._count: dict[str, int] = {}

    def is_at(self, point: str) -> bool:
        number, role, wanted = json.loads((self._folder / "order").read_text(encoding="utf-8"))
        if number != self._number:
            self._number, self._role, self._count = number, "", {}
        # A role is what a worker is sent first.
        self._role = self._role or ("prefill" if point.endswith(" prefill") else "decode")
        self._count[point] = self._count.get(point, 0) + 1
        numbered = f"{point} ({self._count[point]})"
        with (self._folder / f"passed-{number}-{self._role}").open("a", encoding="utf-8") as file:
            file.write(f"{numbered}\n")
        if (self._role, numbered) != (role, wanted):
            return False
        try:
            (self._folder / f"dead-{number}").touch(exist_ok=False)
        except FileExistsError:  # another one died here
            return False
        return True

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Give the workers of this process mortal channels, where the environment names an order."""
    if VARIABLE not in os.environ:
        return
    deaths = _OrderedDeaths(Path(os.environ[VARIABLE]))

    def connect(connection: socket.socket, key: bytes, kinds: Any) -> Channel:
        return Mortal(connection, key, deaths)

    vars(engine_worker)["Channel"] = connect
