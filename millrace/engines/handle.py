"""The trainer's handle of an engine process: start it, monitor its messages, end it and clean up.

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

from millrace.engines.recorded import DIRECT, LETTERS, CommandGate, RecordedCommands
from millrace.engines.wire import REPORTS, Channel
from millrace.keeper import keeper_command

MODULE = "millrace.engines.engine_worker"
# Startup timeout: import torch, build the model, load compiled kernels.
START_S = 300.0
# Exit timeout after the connection has closed or the process was killed.
END_S = 10.0
TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings shared by all engines of a run.

    Attributes:
        files: contents of the files that `build.save_engine` wrote, by relative path.
        threads: CPU threads per process. The threads of torch spin while they wait for each other, so
            processes that compute concurrently and share a core slow each other down.
        kv: see `PagedEngine.load_weights`.
        interrupt: whether a weight update is applied between two tokens. If not, it is applied after all
            requests that were submitted before it have finished; later requests wait for it.
        delta: whether engines without access to the shared memory receive only the changed bytes.
    """

    files: Mapping[str, bytes]
    threads: int
    kv: Literal["recompute", "keep"] = "recompute"
    interrupt: bool = True
    delta: bool = False


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Startup arguments of one worker process: settings and inherited file descriptors.

    Attributes:
        folder: holds the files of `EngineSettings`; the process removes it.
        threads: see `EngineSettings`.
        kv: likewise.
        interrupt: likewise.
        line: descriptor of its end of the socket pair.
        weights: descriptor of the shared memory for weight updates.
    """

    folder: str
    threads: int
    kv: Literal["recompute", "keep"]
    interrupt: bool
    line: int
    weights: int


@dataclass(slots=True, eq=False)
class EngineHandle:
    """Handle of one engine process.

    Attributes:
        name: engine name.
        process: the engine process, or its keeper, which exits with the same code.
        line: connection to the engine.
        lifeline: descriptor; closing it kills the process. See `millrace.keeper`.
        log: unnamed file with stdout and stderr of the process.
        num_barren: consecutive predecessors that were lost before they generated a completion.
        ready: whether startup has finished.
        drawing: ids of the in-flight requests.
        num_drawn: number of finished requests.
        held: the weight update that it verified last.
        order: the weight update that it is loading.
        failed_once: whether loading `order` has failed once.
        announce: whether to emit `WeightsLoaded` when `order` is loaded.
        clock: monotonic time in seconds.
        heard_s: time of its last message, or of the command that ended its idle time.
        given: codes of the commands that were sent and not yet acknowledged.
        gate: in a replay, restores the recorded order of commands.
        folder: startup files; the process removes them once it has read them, `kill` at the latest.
        added: whether it was added at run time and neither it nor a predecessor has generated; the run can
            go on without it.
        leaves: whether it is being drained: it ends after its in-flight requests.
    """

    name: str
    process: subprocess.Popen[bytes]
    line: Channel
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
    gate: CommandGate | None = None
    folder: str = ""
    added: bool = False
    leaves: bool = False

    def __post_init__(self) -> None:
        self.heard_s = self.clock()

    @property
    def works(self) -> bool:
        """Whether a message from it is expected."""
        draws = bool(self.drawing) and self.held is not None
        return not self.ready or self.order is not None or draws

    def overdue(self, silence_s: float) -> str:
        """Return the reason if its heartbeat has timed out, otherwise an empty string.

        Received messages must be processed before this call.

        Args:
            silence_s: heartbeat timeout of a started engine with work to do; `START_S` applies before that.
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

    def begin(self, script: RecordedCommands | None) -> None:
        """Restart its turn counter; nothing may be in flight. In a replay, send the recorded schedule."""
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
        """Send a command; if the engine was idle, or is to load weights, the heartbeat timeout starts now.

        Args:
            kind: kind of the frame.
            note: its JSON part.
            arrays: its arrays by name.
            direct: whether it submits blocking requests.
        """
        if not self.works or kind == "load":
            self.heard_s = self.clock()
        letter = DIRECT if direct else LETTERS[kind]
        order = (letter, kind, note, arrays)
        for given, *frame in [order] if self.gate is None else self.gate.due(letter, order):
            self.given.append(given)
            self._put(*frame)

    def _put(self, kind: str, note: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
        self.line.put(kind, note, arrays)

    def took(self, counts: Sequence[Sequence[int]]) -> list[tuple[int, str]]:
        """Return the codes of the commands that it acknowledged, by the turn before which it started them.

        Args:
            counts: number of commands by turn, as the engine reports them.
        """
        return [(turn, "".join(self.given.popleft() for _ in range(count))) for turn, count in counts]

    def obituary(self) -> str:
        """Return the exit reason of a process whose connection has closed."""
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "it closed its line"
        if code < 0:
            return f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code}"

    def last_words(self) -> str:
        """Return the tail of its log as a clause for an error message; empty if it printed nothing."""
        end = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, end - TAIL_BYTES))
        said = self.log.read().decode("utf-8", "replace").strip()
        return f"; the last it printed: {said}" if said else ""

    def kill(self) -> None:
        """Kill the process and its children, and release its resources."""
        os.close(self.lifeline)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # the keeper hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_S)
        self.line.close()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def read_files(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder, by relative path."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the result of `read_files` to an existing folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class StartEngine(Protocol):
    """Callback with the signature of `start`."""

    def __call__(
        self,
        name: str,
        settings: EngineSettings,
        weights: int,
        *,
        num_barren: int,
        clock: Callable[[], float],
    ) -> EngineHandle:
        """Start an engine; it reports `ready` once it is up."""
        ...


def start(
    name: str,
    settings: EngineSettings,
    weights: int,
    *,
    num_barren: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> EngineHandle:
    """Start an engine process; it reports `ready` once it is up.

    Args:
        name: engine name.
        settings: settings shared by all engines of the run.
        weights: descriptor of the shared memory for weight updates.
        num_barren: see `EngineHandle`.
        clock: see `EngineHandle`.
    """
    ours, theirs = socket.socketpair()
    read_end, lifeline = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
    folder = tempfile.mkdtemp(prefix="millrace-engine-")
    shared = (settings.threads, settings.kv, settings.interrupt)
    given = EngineStart(folder, *shared, theirs.fileno(), weights)
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
            # torch reads it at import.
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
    return EngineHandle(
        name, process, Channel(ours, REPORTS), lifeline, log, num_barren, clock=clock, folder=folder
    )
