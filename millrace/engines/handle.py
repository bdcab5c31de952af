"""The trainer's handle of an engine, and the one of an engine process: start it, end it and clean up.

No torch.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from millrace.engines.wire import (
    MAX_BODY_BYTES,
    MAX_DATA_BYTES,
    REPORTS,
    Frame,
    FrameError,
    parsed,
    serialized,
)
from millrace.processes.child import ChildProcess, WorkerProgram

if TYPE_CHECKING:
    from millrace.transport.shared_memory import WeightManifest

ENTRY = "millrace.engines.engine_worker:serve"


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


class EngineHandle(Protocol):
    """One engine, wherever it runs: a process of this machine, a Ray actor, or a server."""

    def watch(self) -> list[tuple[int, int]]:
        """Send what is left to send; return the descriptors and events of `select.poll` to wait for."""
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
        """Return the reports that have arrived.

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


class SubprocessEngine(ChildProcess):
    """An engine in a process of this machine."""

    def send(
        self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """See `EngineHandle`; what fits is sent at once."""
        self.notify(*serialized(kind, metadata, arrays or {}))
        self._channel.flush()

    def update_weights(self, manifest: WeightManifest, held: int | None) -> None:
        """See `EngineHandle`; the engine maps the shared memory."""
        self.send("update_weights", manifest)

    def receive(self) -> list[Frame]:
        """See `EngineHandle`."""
        return [parsed(body, data, REPORTS) for _, body, data in self.exchange()]


def read_files(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder, by relative path."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the result of `read_files` to an existing folder; FrameError if a name leads out of it."""
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise FrameError(f"a file of the engine is called {name}, which leads out of its folder")
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def start(name: str, settings: EngineSettings, weights: int) -> SubprocessEngine:
    """Start an engine process; see `EngineStarter`."""
    return SubprocessEngine(engine_program(name, settings, weights, ENTRY), time.monotonic)


def engine_program(
    name: str, settings: EngineSettings, weights: int, entry: str, **more: Any
) -> WorkerProgram:
    """Write the files of an engine, and describe its process.

    Args:
        name: engine name.
        settings: settings shared by all engines of the run.
        weights: descriptor of the shared memory for weight updates.
        entry: function that runs in the process.
        more: settings of this process alone.

    Raises:
        OSError: the disk is full.
    """
    folder = tempfile.mkdtemp(prefix="millrace-engine-")
    try:
        write_files(settings.files, Path(folder))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return WorkerProgram(
        name=name,
        entry=entry,
        settings={
            "folder": folder,
            "threads": settings.threads,
            "kv": settings.kv,
            "interrupt": settings.interrupt,
            "weights": weights,
            **more,
        },
        path=sys.path,
        # torch reads it at import.
        environment={**os.environ, "OMP_NUM_THREADS": str(settings.threads)},
        start_s=math.inf,  # the supervisor of the engines has one heartbeat timeout for these and Ray's
        max_reply_bytes=MAX_BODY_BYTES,
        max_data_bytes=MAX_DATA_BYTES,
        reports=True,
        pass_fds=(weights,),
        remove=folder,
    )
