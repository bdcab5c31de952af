"""The trainer's handle of an engine, and the one of an engine process: start it, end it and clean up.

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from millrace.engines.wire import REPORTS, Channel, Frame
from millrace.keeper import keeper_command

if TYPE_CHECKING:
    from millrace.transport.shared_memory import WeightManifest

MODULE = "millrace.engines.engine_worker"
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
        kv: see `PagedEngine.update_weights`.
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
    """Arguments of one worker process: `EngineSettings`, whose files are in `folder` until it reads them.

    `channel` and `weights` are inherited descriptors of its end of the socket pair and of the shared memory.
    """

    folder: str
    threads: int
    kv: Literal["recompute", "keep"]
    interrupt: bool
    channel: int
    weights: int


class EngineHandle(Protocol):
    """One engine, wherever it runs: a process of this machine, a Ray actor, or a server."""

    def fileno(self) -> int:
        """Return a descriptor for `poll`, which is readable when a report has arrived."""
        ...

    @property
    def unsent(self) -> bool:
        """Whether commands are left to send once the descriptor is writable."""
        ...

    def send(
        self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Send a command as a frame; see `wire.COMMANDS`."""
        ...

    def update_weights(self, manifest: WeightManifest, held: int | None) -> None:
        """Command it to load the weights in the shared memory.

        Args:
            manifest: of the weights.
            held: the version that it has verified, None if its weights are unknown.
        """
        ...

    def receive(self) -> list[Frame]:
        """Return the reports that have arrived, and send what is left to send.

        Raises:
            FrameError: one is invalid.
        """
        ...

    def exit_reason(self) -> str:
        """Return why it has ended; empty while it runs."""
        ...

    def log_tail(self) -> str:
        """Return the tail of its log as a clause for an error message; empty if it printed nothing."""
        ...

    def kill(self) -> None:
        """Kill it and release its resources."""
        ...


class EngineStarter(Protocol):
    """Starts an engine, which reports `ready` once it is up; `start` starts a process."""

    def __call__(self, name: str, settings: EngineSettings, weights: int) -> EngineHandle:
        """Start an engine.

        Args:
            name: engine name.
            settings: settings shared by all engines of the run.
            weights: descriptor of the shared memory for weight updates.

        Raises:
            OSError, RayTrainerError: there are too few resources for it.
        """
        ...


class ChannelEngine:
    """What handles have in common whose engine speaks the frames of `wire` over a socket."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.fileno, self.send = channel, channel.fileno, channel.send

    @property
    def unsent(self) -> bool:
        """See `EngineHandle`."""
        return self.channel.unsent

    def update_weights(self, manifest: WeightManifest, held: int | None) -> None:
        """See `EngineHandle`; the engine maps the shared memory."""
        self.send("update_weights", manifest)

    def receive(self) -> list[Frame]:
        """See `EngineHandle`."""
        frames = self.channel.take()
        self.channel.flush()
        return frames


class SubprocessEngine(ChannelEngine):
    """An engine in a process of this machine."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: Channel, lifeline: int, log: IO[bytes], folder: str
    ) -> None:
        """Take over a process; `start` starts it.

        Args:
            process: the engine process, or its keeper, which exits with the same code.
            channel: connection to the engine.
            lifeline: descriptor; closing it kills the process. See `millrace.keeper`.
            log: unnamed file with stdout and stderr of the process.
            folder: startup files; the process removes them once it has read them, `kill` at the latest.
        """
        super().__init__(channel)
        self.process, self._lifeline, self._log, self._folder = process, lifeline, log, folder

    def exit_reason(self) -> str:
        """See `EngineHandle`."""
        if not self.channel.ended and self.process.poll() is None:
            return ""
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code}"

    def log_tail(self) -> str:
        """See `EngineHandle`."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - TAIL_BYTES))
        tail = self._log.read().decode("utf-8", "replace").strip()
        return f"; the last it printed: {tail}" if tail else ""

    def kill(self) -> None:
        """Kill the process and its children, and release its resources."""
        os.close(self._lifeline)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # the keeper hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_S)
        self.channel.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def read_files(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder, by relative path."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the result of `read_files` to an existing folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def start(name: str, settings: EngineSettings, weights: int) -> SubprocessEngine:
    """Start an engine process; see `EngineStarter`."""
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
    return SubprocessEngine(process, Channel(ours, REPORTS), lifeline, log, folder)
