"""Engines as Ray actors beside the ranks, in a placement group of their own, on any machine of the cluster.

Ray finds room, starts the process and tells when it has gone. Everything else goes over a TCP connection
that the engine opens to the first rank, in the frames of `frames`: it says a token that was made for it and
came by Ray, and gets orders, and weights as bytes. What arrives is neither unpickled nor run.
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

from millrace.engines.build import open_engine
from millrace.engines.handle import Child, Settings, write_files
from millrace.engines.ray_placement import one_more, plain, reserved
from millrace.engines.wire import ORDERS, REPORTS, Frame, Line
from millrace.engines.worker import Mailbox
from millrace.inference.engine import PagedEngine
from millrace.transport.memory import pieces

TOKEN_BYTES = 32
# Of the weights, so much at once.
PIECE_BYTES = 1 << 24
# How long who calls may take to say the token, and an engine to reach the first rank.
TOKEN_S = 1.0
CALL_S = 60.0


def inside() -> bool:
    """Whether this process is one that Ray has started."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


class Engine:
    """One engine, in a process that Ray started for it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        """What Ray writes before each line that it prints for this engine."""
        return self._name

    def serve(self, host: str, port: int, token: str, settings: dict[str, Any]) -> None:
        """Draw until the first rank closes the connection.

        Args:
            host: of the first rank.
            port: where it waits for this engine.
            token: to be said there.
            settings: the fields of `Settings`.
        """
        given = Settings(**settings)
        torch.set_num_threads(given.threads)
        with tempfile.TemporaryDirectory(prefix="millrace-engine-") as folder:
            write_files(given.files, Path(folder))
            engine = open_engine(Path(folder))
        end = socket.create_connection((host, port), timeout=CALL_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(token.encode())
        with closing(Line(end, (*ORDERS, "weights"))) as line:
            Remote(engine, line, given).serve()


class Remote(Mailbox):
    """A mailbox to which weights come in pieces, before the order to load them."""

    def __init__(self, engine: PagedEngine, line: Line, settings: Settings) -> None:
        """See `Mailbox`."""
        self._memory = os.memfd_create("millrace-weights")
        super().__init__(engine, line, self._memory, kv=settings.kv, interrupt=settings.interrupt)
        self._orders["weights"] = self._take

    def _take(self, frame: Frame) -> None:
        # Nothing is read there meanwhile: a version is sent once the one before has been answered.
        piece, at = frame.arrays["piece"].data, frame.note["begin"]
        while piece:
            num_written = os.pwrite(self._memory, piece, at)
            piece, at = piece[num_written:], at + num_written
        # Somebody may be counting how long it is silent.
        self._say("beat")


class Called(Line):
    """A line to an engine that will call; who does not say its token is hung up on."""

    def __init__(self, host: str) -> None:
        """Listen on a free port.

        Args:
            host: address of this machine that the engine can reach.
        """
        listener = socket.create_server((host, 0))
        super().__init__(listener, REPORTS)
        self.port, self.token = listener.getsockname()[1], secrets.token_hex(TOKEN_BYTES)
        self._open = False
        self._later: deque[tuple[str, Mapping[str, Any] | None, Mapping[str, np.ndarray] | None]] = deque()

    def take(self) -> list[Frame]:
        """The frames that have arrived whole, once the engine has called."""
        if not self._open:
            self._answer()
        return super().take() if self._open else []

    @property
    def unsent(self) -> bool:
        """Whether the socket has not taken everything yet."""
        return bool(self._later) or super().unsent

    def put(
        self,
        kind: str,
        note: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Send a frame after all before it; its arrays must not change until the other end has answered."""
        self._later.append((kind, note, arrays))
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes now; what does not fit is copied when its turn comes."""
        if not self._open:
            return
        super().flush()
        while self._later and not super().unsent:
            self._add(*self._later.popleft())
            super().flush()

    def _answer(self) -> None:
        try:
            end, _ = self._end.accept()
        except BlockingIOError:
            return
        end.settimeout(TOKEN_S)
        said = b""
        with suppress(OSError):  # whoever is silent or gone did not say it
            while len(said) < len(self.token) and (data := end.recv(len(self.token) - len(said))):
                said += data
        if not hmac.compare_digest(said, self.token.encode()):
            end.close()
            return
        self._end.close()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(False)
        self._end, self._open = end, True


@dataclass(slots=True)
class _Work:
    """What an actor does, in the place of a process."""

    ray: Any
    actor: Any
    work: Any

    def poll(self) -> int | None:
        return 1 if self.ray.wait([self.work], timeout=0)[0] else None

    def wait(self, timeout: float) -> int:
        if not self.ray.wait([self.work], timeout=timeout)[0]:
            raise subprocess.TimeoutExpired("serve", timeout)
        return 1


@dataclass(slots=True, eq=False)
class RemoteChild(Child):
    """One engine in an actor.

    Attributes:
        weights: descriptor of the memory in which they lie here.
        leave: gives back the room that it had.
    """

    weights: int = -1
    leave: Callable[[], None] = field(default=lambda: None)

    def _put(self, kind: str, note: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
        """Send a frame; before one to load, the weights, or of them what changed."""
        if kind == "load":
            changed, base = note["changes"], self.held and self.held["version"]
            # What was patched and refused travels whole.
            patches = changed and changed["base"] == base and not self.failed_once
            note = {**note, "patch": changed["packed"] if patches else {}, "changes": None}
            held = np.frombuffer(mmap.mmap(self.weights, 0, prot=mmap.PROT_READ), np.uint8)
            for begin, end in pieces(note, PIECE_BYTES):
                self.line.put("weights", {"begin": begin}, {"piece": held[begin:end]})
        self.line.put(kind, note, arrays)

    def obituary(self) -> str:
        """How it has ended."""
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return "its actor ended"

    def last_words(self) -> str:
        """What Ray says of its end, after a colon; nothing while it lives."""
        work = cast(_Work, self.process)
        if work.poll() is None:
            return ""
        try:
            work.ray.get(work.work)
        except work.ray.exceptions.RayError as error:
            return f"; {' '.join(plain(error).splitlines()[-1:])}"
        return ""

    def kill(self) -> None:
        """End the actor, and give back what was held for it."""
        work = cast(_Work, self.process)
        work.ray.kill(work.actor)
        self.line.close()
        self.leave()


class Actors:
    """Room for the engines of a run; use it as a context manager. Its `start` is `handle.start` on Ray."""

    def __init__(self, num_engines: int, *, on_gpu: bool) -> None:
        """Reserve room.

        Args:
            num_engines: for which room is kept as long as the run goes on; others may come and go.
            on_gpu: whether each needs a GPU.

        Raises:
            RayTrainerError: the cluster has no room for all of them.
        """
        import ray

        self._ray, self._gpus = ray, int(on_gpu)
        self._share = {"CPU": 1, **({"GPU": 1} if on_gpu else {})}
        self._group = reserved(ray, num_engines, self._share, what="engines")
        self._num_free = num_engines

    def __enter__(self) -> Actors:
        """There is room."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Give the room back; what is in it ends."""
        self._ray.util.remove_placement_group(self._group)

    def start(
        self, name: str, settings: Settings, weights: int, *, num_barren: int, clock: Callable[[], float]
    ) -> Child:
        """Start an engine; it says `ready` when it is.

        Raises:
            RayTrainerError: it is one more than there is room for.
        """
        ray, (group, leave) = self._ray, self._room()
        # This is the first rank, whom the other ranks find there too.
        host = os.environ["MASTER_ADDR"]
        line = Called(host)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        actor = (
            ray.remote(Engine)
            .options(num_cpus=1, num_gpus=self._gpus, scheduling_strategy=strategy)
            .remote(name)
        )
        work = actor.serve.remote(host, line.port, line.token, asdict(settings))
        process = cast("subprocess.Popen[bytes]", _Work(ray, actor, work))
        return RemoteChild(
            name,
            process,
            line,
            -1,
            io.BytesIO(),
            num_barren,
            clock=clock,
            weights=weights,
            leave=leave,
        )

    def _room(self) -> tuple[Any, Callable[[], None]]:
        """The placement group of one engine, and what gives its room back."""
        if not self._num_free:
            own = one_more(self._ray, self._share)
            return own, partial(self._ray.util.remove_placement_group, own)
        self._num_free -= 1
        return self._group, self._vacate

    def _vacate(self) -> None:
        self._num_free += 1
