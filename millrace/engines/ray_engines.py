"""Engines as Ray actors in a placement group of their own, on any machine of the cluster.

Ray schedules the actor, starts its process and reports its exit. Everything else goes over a TCP connection
that the engine opens to rank 0, in the frames of `wire`. The engine authenticates with a token that it got
through Ray, then receives commands, and weights as bytes. Received data is neither unpickled nor executed.
"""

from __future__ import annotations

import hmac
import io
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch

from millrace.engines.build_engine import open_engine
from millrace.engines.engine_worker import EngineWorker
from millrace.engines.handle import EngineHandle, EngineSettings, write_files
from millrace.engines.ray_placement import one_more, plain, reserved
from millrace.engines.wire import COMMANDS, REPORTS, Channel, Frame
from millrace.inference.engine import PagedEngine
from millrace.transport.shared_memory import pieces

TOKEN_BYTES = 32
# Chunk size of a weight transfer.
PIECE_BYTES = 1 << 24
# Timeouts: for the token of an accepted connection, and for an engine to connect to rank 0.
TOKEN_S = 1.0
CALL_S = 60.0


def inside() -> bool:
    """Whether this process is a Ray worker."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


class EngineActor:
    """Ray actor that runs one engine."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        """Return the prefix that Ray prints before each log line of this actor."""
        return self._name

    def serve(self, host: str, port: int, token: str, settings: dict[str, Any]) -> None:
        """Generate until rank 0 closes the connection.

        Args:
            host: address of rank 0.
            port: port on which rank 0 listens for this engine.
            token: authenticates this engine.
            settings: the fields of `EngineSettings`.
        """
        given = EngineSettings(**settings)
        torch.set_num_threads(given.threads)
        with tempfile.TemporaryDirectory(prefix="millrace-engine-") as folder:
            write_files(given.files, Path(folder))
            engine = open_engine(Path(folder))
        connection = socket.create_connection((host, port), timeout=CALL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token.encode())
        with closing(Channel(connection, (*COMMANDS, "weights"))) as channel:
            RemoteEngineWorker(engine, channel, given).serve()


class RemoteEngineWorker(EngineWorker):
    """Engine worker that receives weights in chunks over its connection, before the load command."""

    def __init__(self, engine: PagedEngine, channel: Channel, settings: EngineSettings) -> None:
        """Receive weights into local memory; the rest is as in `EngineWorker`."""
        self._memory = os.memfd_create("millrace-weights")
        super().__init__(engine, channel, self._memory, kv=settings.kv, interrupt=settings.interrupt)
        self._handlers["weights"] = self._receive_piece

    def _receive_piece(self, frame: Frame) -> None:
        # No reader to race with: an update is sent only after the previous one was acknowledged.
        piece, at = frame.arrays["piece"].data, frame.metadata["begin"]
        while piece:
            num_written = os.pwrite(self._memory, piece, at)
            piece, at = piece[num_written:], at + num_written
        # A long transfer must not exceed the heartbeat timeout.
        self._send("heartbeat")


class ListeningChannel(Channel):
    """Connection to an engine that has yet to connect; a peer without its token is disconnected."""

    def __init__(self, host: str) -> None:
        """Listen on a free port.

        Args:
            host: address of this machine that is reachable from the engine.
        """
        listener = socket.create_server((host, 0))
        super().__init__(listener, REPORTS)
        self.port, self.token = listener.getsockname()[1], secrets.token_hex(TOKEN_BYTES)
        self._open = False
        self._unsent: deque[tuple[str, Mapping[str, Any] | None, Mapping[str, np.ndarray] | None]] = deque()

    def take(self) -> list[Frame]:
        """Return the complete frames received so far; none before the engine has connected."""
        if not self._open:
            self._accept()
        return super().take() if self._open else []

    @property
    def unsent(self) -> bool:
        """Whether unsent data is left."""
        return bool(self._unsent) or super().unsent

    def send(
        self,
        kind: str,
        metadata: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Queue a frame and send what fits; its arrays must stay unchanged until the peer has replied.

        Args:
            kind: kind of the frame.
            metadata: its JSON part.
            arrays: its arrays by name.
        """
        self._unsent.append((kind, metadata, arrays))
        self.flush()

    def flush(self) -> None:
        """Send what the socket accepts now; a frame is serialized only when it is next to be sent."""
        if not self._open:
            return
        super().flush()
        while self._unsent and not super().unsent:
            self._add(*self._unsent.popleft())
            super().flush()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        connection.settimeout(TOKEN_S)
        received = b""
        with suppress(OSError):  # a silent or closed peer has sent no token
            while len(received) < len(self.token) and (
                data := connection.recv(len(self.token) - len(received))
            ):
                received += data
        if not hmac.compare_digest(received, self.token.encode()):
            connection.close()
            return
        self._socket.close()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._socket, self._open = connection, True


@dataclass(slots=True)
class _ActorProcess:
    """An actor's `serve` call with the interface of `subprocess.Popen`."""

    ray: Any
    actor: Any
    task: Any

    def poll(self) -> int | None:
        return 1 if self.ray.wait([self.task], timeout=0)[0] else None

    def wait(self, timeout: float) -> int:
        if not self.ray.wait([self.task], timeout=timeout)[0]:
            raise subprocess.TimeoutExpired("serve", timeout)
        return 1


@dataclass(slots=True, eq=False)
class RayEngineHandle(EngineHandle):
    """Handle of an engine in a Ray actor.

    Attributes:
        weights: descriptor of the trainer's shared memory that holds the weights.
        release: callback that releases its resources in the cluster.
    """

    weights: int = -1
    release: Callable[[], None] = field(default=lambda: None)

    def _send(self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
        """Send a frame; before a load command, send the weights or their changed bytes."""
        if kind == "load":
            changed, base = metadata["changes"], self.loaded and self.loaded["version"]
            # After a failed patch, send the complete weights.
            patches = changed and changed["base"] == base and not self.load_failed
            metadata = {**metadata, "patch": changed["packed"] if patches else {}, "changes": None}
            loaded = np.frombuffer(mmap.mmap(self.weights, 0, prot=mmap.PROT_READ), np.uint8)
            for begin, end in pieces(metadata, PIECE_BYTES):
                self.channel.send("weights", {"begin": begin}, {"piece": loaded[begin:end]})
        self.channel.send(kind, metadata, arrays)

    def exit_reason(self) -> str:
        """Return the exit reason of the actor."""
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return "its actor ended"

    def log_tail(self) -> str:
        """Return Ray's error for the actor's exit as a clause for a message; empty while it is alive."""
        task = cast(_ActorProcess, self.process)
        if task.poll() is None:
            return ""
        try:
            task.ray.get(task.task)
        except task.ray.exceptions.RayError as error:
            return f"; {' '.join(plain(error).splitlines()[-1:])}"
        return ""

    def kill(self) -> None:
        """Kill the actor and release its resources."""
        task = cast(_ActorProcess, self.process)
        task.ray.kill(task.actor)
        self.channel.close()
        self.release()


class Actors:
    """Cluster resources for the engines of a run, as a context manager; `start` is `handle.start` on Ray."""

    def __init__(self, num_engines: int, *, on_gpu: bool) -> None:
        """Reserve resources.

        Args:
            num_engines: engines with a reservation for the whole run; further ones are placed on demand.
            on_gpu: whether each engine needs a GPU.

        Raises:
            RayTrainerError: the cluster has too few resources for all of them.
        """
        import ray

        self._ray, self._gpus = ray, int(on_gpu)
        self._resources = {"CPU": 1, **({"GPU": 1} if on_gpu else {})}
        self._group = reserved(ray, num_engines, self._resources, what="engines")
        self._num_free = num_engines

    def __enter__(self) -> Actors:
        """Return this; the constructor has reserved."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Remove the placement group, which ends the actors in it."""
        self._ray.util.remove_placement_group(self._group)

    def start(
        self,
        name: str,
        settings: EngineSettings,
        weights: int,
        *,
        num_failed_restarts: int,
        clock: Callable[[], float],
    ) -> EngineHandle:
        """Start an engine; it reports `ready` once it is up.

        Args:
            name: engine name.
            settings: settings shared by all engines of the run.
            weights: descriptor of the shared memory for weight updates.
            num_failed_restarts: see `EngineHandle`.
            clock: see `EngineHandle`.

        Raises:
            RayTrainerError: the cluster has no resources for one more engine.
        """
        ray, (group, release) = self._ray, self._reserve()
        # Rank 0 runs here, and this is its address for the other ranks.
        host = os.environ["MASTER_ADDR"]
        channel = ListeningChannel(host)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        actor = (
            ray.remote(EngineActor)
            .options(num_cpus=1, num_gpus=self._gpus, scheduling_strategy=strategy)
            .remote(name)
        )
        task = actor.serve.remote(host, channel.port, channel.token, asdict(settings))
        process = cast("subprocess.Popen[bytes]", _ActorProcess(ray, actor, task))
        return RayEngineHandle(
            name,
            process,
            channel,
            -1,
            io.BytesIO(),
            num_failed_restarts,
            clock=clock,
            weights=weights,
            release=release,
        )

    def _reserve(self) -> tuple[Any, Callable[[], None]]:
        """Return a placement group for one engine and the callback that releases it."""
        if not self._num_free:
            own = one_more(self._ray, self._resources)
            return own, partial(self._ray.util.remove_placement_group, own)
        self._num_free -= 1
        return self._group, self._release_reserved

    def _release_reserved(self) -> None:
        self._num_free += 1
