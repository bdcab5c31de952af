"""Engines as Ray actors in a placement group of their own, on any machine of the cluster.

Ray schedules the actor, starts its process and reports its exit. Everything else goes over a TCP connection
that the engine opens to rank 0, in the frames of `wire`. The engine authenticates with a token that it got
through Ray, and that is the key of the frames, then receives commands, and weights as bytes. Received data is
neither unpickled nor executed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from millrace.engines.build_engine import open_engine
from millrace.engines.engine_worker import EngineWorker
from millrace.engines.handle import EngineSettings, write_files
from millrace.engines.ray_placement import one_more, plain, reserved
from millrace.engines.weight_pieces import send_pieces, write_piece
from millrace.engines.wire import COMMANDS, REPORTS, Channel, Frame
from millrace.inference.engine import PagedEngine
from millrace.processes.worker import KEY_BYTES
from millrace.transport.shared_memory import WeightManifest

# Timeouts: for the token of an accepted connection, and for an engine to connect to rank 0.
TOKEN_S = 1.0
CALL_S = 60.0
# Exit timeout of an actor after its connection has closed.
END_S = 10.0


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
        """Generate until rank 0, at this address, closes the connection; `settings` are `EngineSettings`."""
        given = EngineSettings(**settings)
        torch.set_num_threads(given.threads)
        with tempfile.TemporaryDirectory(prefix="millrace-engine-") as folder:
            write_files(given.files, Path(folder))
            engine = open_engine(Path(folder))
        connection = socket.create_connection((host, port), timeout=CALL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token.encode())
        with closing(Channel(connection, bytes.fromhex(token), (*COMMANDS, "weights"))) as channel:
            RemoteEngineWorker(engine, channel, given).serve()


class RemoteEngineWorker(EngineWorker):
    """Engine worker that receives weights in chunks over its connection, before `update_weights`."""

    def __init__(self, engine: PagedEngine, channel: Channel, settings: EngineSettings) -> None:
        """Receive weights into local memory; the rest is as in `EngineWorker`."""
        self._memory = os.memfd_create("millrace-weights")
        super().__init__(engine, channel, self._memory, kv=settings.kv, interrupt=settings.interrupt)
        self._handlers["weights"] = self._receive_piece

    def _receive_piece(self, frame: Frame) -> None:
        write_piece(self._memory, frame)
        # A long transfer must not exceed the heartbeat timeout.
        self._send("heartbeat")


class ListeningChannel(Channel):
    """Connection to an engine that has yet to connect; a peer without its token is disconnected."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`, an address of this machine that is reachable from the engine."""
        listener = socket.create_server((host, 0))
        key = secrets.token_bytes(KEY_BYTES)
        super().__init__(listener, key, REPORTS)
        self.port, self.token = listener.getsockname()[1], key.hex()
        self._open = False

    def take(self) -> list[tuple[int, bytes, bytearray]]:
        """Return the complete frames received so far; none before the engine has connected."""
        if not self._open:
            self._accept()
        return super().take() if self._open else []

    def flush(self) -> None:
        """Send what the socket accepts now; nothing before the engine has connected."""
        if self._open:
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


class RayEngine:
    """An engine in a Ray actor."""

    def __init__(
        self, ray: Any, actor: Any, task: Any, channel: Channel, weights: int, release: Callable[[], None]
    ) -> None:
        """Take over an actor and its `serve` call; `release` releases its resources in the cluster."""
        self.channel = channel
        self.watch, self.send, self.receive = channel.watch, channel.send, channel.receive
        self._ray, self._actor, self._task = ray, actor, task
        self._weights, self._release = weights, release

    def update_weights(self, manifest: WeightManifest, held: int | None) -> None:
        """See `EngineHandle`; the weights, or their changed bytes, are sent before the command."""
        changed = manifest["changes"]
        patch = changed["packed"] if changed and changed["base"] == held else {}
        self.send("update_weights", send_pieces(self.channel, self._weights, manifest, patch))

    def exit_reason(self) -> str:
        """See `EngineHandle`."""
        if not self.channel.ended and not self._ended(0):
            return ""
        return "its actor ended" if self._ended(END_S) else "it closed its connection"

    def log_tail(self) -> str:
        """Return Ray's error for the actor's exit as a clause for a message; empty while it is alive."""
        if not self._ended(0):
            return ""
        try:
            self._ray.get(self._task)
        except self._ray.exceptions.RayError as error:
            return f"; {' '.join(plain(error).splitlines()[-1:])}"
        return ""

    def kill(self) -> None:
        """Kill the actor and release its resources."""
        self._ray.kill(self._actor)
        self.channel.close()
        self._release()

    def _ended(self, timeout_s: float) -> bool:
        return bool(self._ray.wait([self._task], timeout=timeout_s)[0])


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

    def start(self, name: str, settings: EngineSettings, weights: int) -> RayEngine:
        """Start an engine; see `EngineStarter`."""
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
        return RayEngine(ray, actor, task, channel, weights, release)

    def _reserve(self) -> tuple[Any, Callable[[], None]]:
        """Return a placement group for one engine and the callback that releases it."""
        if not self._num_free:
            own = one_more(self._ray, self._resources)
            return own, partial(self._ray.util.remove_placement_group, own)
        self._num_free -= 1
        return self._group, self._release_reserved

    def _release_reserved(self) -> None:
        self._num_free += 1
