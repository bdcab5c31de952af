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

from millrace.engines.recorded import BLOCKING_SUBMIT, CommandGate, RecordedCommands
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
        channel: descriptor of its end of the socket pair.
        weights: descriptor of the shared memory for weight updates.
    """

    folder: str
    threads: int
    kv: Literal["recompute", "keep"]
    interrupt: bool
    channel: int
    weights: int


@dataclass(slots=True, eq=False)
class EngineHandle:
    """Handle of one engine process.

    Attributes:
        name: engine name.
        process: the engine process, or its keeper, which exits with the same code.
        channel: connection to the engine.
        lifeline: descriptor; closing it kills the process. See `millrace.keeper`.
        log: unnamed file with stdout and stderr of the process.
        num_failed_restarts: consecutive predecessors that were lost before they generated a completion.
        ready: whether startup has finished.
        in_flight: ids of the in-flight requests.
        num_completed: number of finished requests.
        loaded: the weight update that it verified last.
        loading: the weight update that it is loading.
        load_failed: whether `loading` has failed once.
        report_loaded: whether to emit `WeightsLoaded` for `loading`.
        clock: monotonic time in seconds.
        last_message_s: time of its last message, or of the command that ended its idle time.
        unacknowledged: names of the commands that were sent and not yet acknowledged.
        gate: in a replay, restores the recorded order of commands.
        folder: startup files; the process removes them once it has read them, `kill` at the latest.
        added: whether it was added at run time and neither it nor a predecessor has generated; the run can
            go on without it.
        draining: whether it is draining: it ends after its in-flight requests.
    """

    name: str
    process: subprocess.Popen[bytes]
    channel: Channel
    lifeline: int
    log: IO[bytes]
    num_failed_restarts: int
    ready: bool = False
    in_flight: set[str] = field(default_factory=set)
    num_completed: int = 0
    loaded: Mapping[str, Any] | None = None
    loading: Mapping[str, Any] | None = None
    load_failed: bool = False
    report_loaded: bool = False
    clock: Callable[[], float] = time.monotonic
    last_message_s: float = field(init=False)
    unacknowledged: deque[str] = field(default_factory=deque)
    gate: CommandGate | None = None
    folder: str = ""
    added: bool = False
    draining: bool = False

    def __post_init__(self) -> None:
        self.last_message_s = self.clock()

    @property
    def busy(self) -> bool:
        """Whether a message from it is expected."""
        generates = bool(self.in_flight) and self.loaded is not None
        return not self.ready or self.loading is not None or generates

    def overdue(self, heartbeat_s: float) -> str:
        """Return the reason if its heartbeat has timed out, otherwise an empty string.

        Received messages must be processed before this call.

        Args:
            heartbeat_s: heartbeat timeout of a started engine with work to do; `START_S` applies before that.
        """
        if not self.busy:
            return ""
        timeout_s = heartbeat_s if self.ready else START_S
        if self.clock() <= self.last_message_s + timeout_s:
            return ""
        task = "to start" if not self.ready else f"to generate {len(self.in_flight)} completions"
        if self.loading is not None:
            task = f"to load version {self.loading['version']}"
        return f"it had {task} and sent no message for {timeout_s:g} s"

    def begin(self, recorded: RecordedCommands | None) -> None:
        """Restart its turn counter; nothing may be in flight. In a replay, send the recorded schedule."""
        self.unacknowledged.clear()
        self.gate = None if recorded is None else recorded.gate(self.name)
        self.channel.send("begin", {"recorded": [] if recorded is None else recorded.turns(self.name)})

    def send(
        self,
        kind: str,
        metadata: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        blocking: bool = False,
    ) -> None:
        """Send a command; if the engine was idle, or is to load weights, the heartbeat timeout starts now.

        Args:
            kind: kind of the frame.
            metadata: its JSON part.
            arrays: its arrays by name.
            blocking: whether it submits blocking requests.
        """
        if not self.busy or kind == "load":
            self.last_message_s = self.clock()
        command = BLOCKING_SUBMIT if blocking else kind
        named = (command, kind, metadata, arrays)
        for name, *frame in [named] if self.gate is None else self.gate.due(command, named):
            self.unacknowledged.append(name)
            self._send(*frame)

    def _send(self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
        self.channel.send(kind, metadata, arrays)

    def started_commands(self, counts: Sequence[Sequence[int]]) -> list[tuple[int, list[str]]]:
        """Return the names of the commands that it acknowledged, by the turn before which it started them.

        Args:
            counts: number of commands by turn, as the engine reports them.
        """
        return [(turn, [self.unacknowledged.popleft() for _ in range(count)]) for turn, count in counts]

    def exit_reason(self) -> str:
        """Return the exit reason of a process whose connection has closed."""
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code}"

    def log_tail(self) -> str:
        """Return the tail of its log as a clause for an error message; empty if it printed nothing."""
        end = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, end - TAIL_BYTES))
        tail = self.log.read().decode("utf-8", "replace").strip()
        return f"; the last it printed: {tail}" if tail else ""

    def kill(self) -> None:
        """Kill the process and its children, and release its resources."""
        os.close(self.lifeline)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # the keeper hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_S)
        self.channel.close()
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
        num_failed_restarts: int,
        clock: Callable[[], float],
    ) -> EngineHandle:
        """Start an engine; it reports `ready` once it is up."""
        ...


def start(
    name: str,
    settings: EngineSettings,
    weights: int,
    *,
    num_failed_restarts: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> EngineHandle:
    """Start an engine process; it reports `ready` once it is up.

    Args:
        name: engine name.
        settings: settings shared by all engines of the run.
        weights: descriptor of the shared memory for weight updates.
        num_failed_restarts: see `EngineHandle`.
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
            pass_fds=(given.channel, read_end, given.weights),
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
        name, process, Channel(ours, REPORTS), lifeline, log, num_failed_restarts, clock=clock, folder=folder
    )
