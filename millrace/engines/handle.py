"""An engine's process as the trainer holds it: started, judged by what it says, and ended without a trace.

No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np

from millrace.engines.recorded import DIRECT, LETTERS, Gate, Script
from millrace.engines.wire import REPORTS, Line
from millrace.keeper import keeper_command

MODULE = "millrace.engines.worker"
# How long a process may take to be there: to import torch, to make the model, to load compiled kernels.
START_S = 300.0
# How long one whose line is closed may take to end by itself, and a killed one to be gone.
END_S = 10.0
TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Settings:
    """What the engines of a run have in common.

    Attributes:
        files: what `build.save_engine` wrote, by name.
        threads: of each process; those of torch spin while they wait for one another, so processes that
            compute at the same time and share a core hold each other up.
        kv: see `PagedEngine.load_weights`.
        interrupt: whether new weights come between two tokens, or once all has been drawn that was submitted
            before they were; what is submitted after that waits for them.
        delta: whether those that do not see the shared memory are sent only what changed in it.
    """

    files: Mapping[str, bytes]
    threads: int
    kv: Literal["recompute", "keep"] = "recompute"
    interrupt: bool = True
    delta: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """What one process is started with: settings, and descriptors that it inherits.

    Attributes:
        folder: what `build.save_engine` wrote; the process removes it.
        threads: see `Settings`.
        kv: likewise.
        interrupt: likewise.
        line: its end of a socket pair.
        weights: the memory through which they come.
    """

    folder: str
    threads: int
    kv: Literal["recompute", "keep"]
    interrupt: bool
    line: int
    weights: int


@dataclass(slots=True, eq=False)
class Child:
    """One engine.

    Attributes:
        name: of the engine.
        process: its process, or the keeper of that, which ends as it does.
        line: to it.
        lifeline: while this descriptor is open, the process may live; see `millrace.keeper`.
        log: what it printed; the file has no name.
        num_barren: how many before it, one after the other, drew nothing and were lost.
        ready: it has started.
        drawing: what it was asked to draw and has not drawn.
        num_drawn: what it has.
        held: the weights that it proved last.
        order: those that it is to load now.
        failed_once: whether it has tried that in vain.
        announce: whether anybody waits to hear that it has loaded them.
        clock: seconds, never going back.
        heard_s: when it last said something, or was given something to do.
        given: letters of the orders that it has not said it took up.
        gate: in a replay, what orders pass through.
        folder: from which it starts; there until it has read it, or is ended.
        added: it was asked for on the way, and nobody in its place has drawn; a run can go on without it.
        leaves: it is to end once it has drawn what it was asked for.
    """

    name: str
    process: subprocess.Popen[bytes]
    line: Line
    lifeline: int
    log: IO[bytes]
    num_barren: int
    ready: bool = False
    drawing: set[str] = field(default_factory=set)
    num_drawn: int = 0
    held: Mapping[str, Any] | None = None
    order: Mapping[str, Any] | None = None
    failed_once: bool = False
    announce: bool = False
    clock: Callable[[], float] = time.monotonic
    heard_s: float = field(init=False)
    given: deque[str] = field(default_factory=deque)
    gate: Gate | None = None
    folder: str = ""
    added: bool = False
    leaves: bool = False

    def __post_init__(self) -> None:
        self.heard_s = self.clock()

    @property
    def works(self) -> bool:
        """Whether something should be heard of it."""
        draws = bool(self.drawing) and self.held is not None
        return not self.ready or self.order is not None or draws

    def overdue(self, silence_s: float) -> str:
        """Why it must be given up, if it was silent for too long; otherwise nothing.

        Args:
            silence_s: how long one that has started may be silent while it works; everything that it said
                has been heard.
        """
        if not self.works:
            return ""
        most_s = silence_s if self.ready else START_S
        if self.clock() <= self.heard_s + most_s:
            return ""
        doing = "to start" if not self.ready else f"to draw {len(self.drawing)} completions"
        if self.order is not None:
            doing = f"to load version {self.order['version']}"
        return f"it had {doing} and was not heard of for {most_s:g} s"

    def begin(self, script: Script | None) -> None:
        """Have it count turns from here, nothing being under way; in a replay, by a script."""
        self.given.clear()
        self.gate = None if script is None else script.gate(self.name)
        self.line.put("begin", {"script": [] if script is None else script.turns(self.name)})

    def give(
        self,
        kind: str,
        note: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        direct: bool = False,
    ) -> None:
        """Send an order, of draws whose caller waits or not; silence is counted from now on."""
        if not self.works or kind == "load":
            self.heard_s = self.clock()
        letter = DIRECT if direct else LETTERS[kind]
        order = (letter, kind, note, arrays)
        for given, *frame in [order] if self.gate is None else self.gate.due(letter, order):
            self.given.append(given)
            self._put(*frame)

    def _put(self, kind: str, note: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
        """Send a frame."""
        self.line.put(kind, note, arrays)

    def took(self, counts: Sequence[Sequence[int]]) -> list[tuple[int, str]]:
        """The letters of the orders that it says it took up, by the turn before which it did."""
        return [(turn, "".join(self.given.popleft() for _ in range(count))) for turn, count in counts]

    def obituary(self) -> str:
        """How a process whose line is closed has ended."""
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "it closed its line"
        if code < 0:
            return f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code}"

    def last_words(self) -> str:
        """The end of what it printed, after a colon; nothing if it printed nothing."""
        end = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, end - TAIL_BYTES))
        said = self.log.read().decode("utf-8", "replace").strip()
        return f"; the last it printed: {said}" if said else ""

    def kill(self) -> None:
        """End the process and every one it started, and give back what was held for it."""
        os.close(self.lifeline)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # something stopped the keeper
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_S)
        self.line.close()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def read_files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its name in it."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """What `read_files` read, into a folder that is there."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class StartChild(Protocol):
    """Starts an engine, as `start` does."""

    def __call__(
        self, name: str, settings: Settings, weights: int, *, num_barren: int, clock: Callable[[], float]
    ) -> Child:
        """Start an engine; it says `ready` when it is."""
        ...


def start(
    name: str,
    settings: Settings,
    weights: int,
    *,
    num_barren: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Child:
    """Start an engine; it says `ready` when it is.

    Args:
        name: of the engine.
        settings: of every engine of a run.
        weights: descriptor of the memory through which weights come.
        num_barren: see `Child`.
        clock: likewise.
    """
    ours, theirs = socket.socketpair()
    read_end, lifeline = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
    folder = tempfile.mkdtemp(prefix="millrace-engine-")
    shared = (settings.threads, settings.kv, settings.interrupt)
    given = Start(folder, *shared, theirs.fileno(), weights)
    try:
        write_files(settings.files, Path(folder))
        process = subprocess.Popen(
            keeper_command(
                read_end, [sys.executable, "-m", MODULE, json.dumps(asdict(given))], remove=folder
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(given.line, read_end, given.weights),
            # Read when torch is imported.
            env={**os.environ, "OMP_NUM_THREADS": str(settings.threads)},
            start_new_session=True,
        )
    except OSError:
        ours.close()
        os.close(lifeline)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        theirs.close()
        os.close(read_end)
    return Child(name, process, Line(ours, REPORTS), lifeline, log, num_barren, clock=clock, folder=folder)
