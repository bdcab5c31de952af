"""Prefill and decode workers on other machines: what `millrace serve-worker` runs there, and its handle.

The worker listens, and the serving process connects. The key of the frames is made of a token that both have
and of random bytes that the worker sends first, so a peer without the token fails at its first frame. What is
received is neither unpickled nor executed. Nothing is encrypted.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.distributed.network import gloo_variables
from millrace.engines.build_engine import open_engine
from millrace.engines.handle import write_files
from millrace.engines.kv_network import KvNetwork
from millrace.engines.prefill_decode_handle import ROLE_COMMANDS, ROLE_REPORTS
from millrace.engines.prefill_decode_worker import PrefillDecodeWorker
from millrace.engines.weight_pieces import send_pieces, write_piece
from millrace.engines.wire import Channel, Frame, FrameError
from millrace.inference.engine import PagedEngine
from millrace.processes.worker import KEY_BYTES

Address = tuple[str, int]
# What a worker of another machine receives besides: its settings first, and weights as bytes.
REMOTE_COMMANDS = ("start", "weights", *ROLE_COMMANDS)
# Timeouts: for the first bytes of a peer, and until one of the addresses has a worker that is free.
HELLO_S, CONNECT_S = 10.0, 300.0
RETRY_S = 1.0
# A connection whose other machine is not reached ends after about this.
UNREACHABLE_S = 60


class RemoteWorker:
    """A worker that another machine serves, from the serving process's side; see `RoleHandle`.

    `release` makes the address free again.
    """

    def __init__(self, address: Address, channel: Channel, weights: int, release: Callable[[], None]) -> None:
        self._address, self._channel, self._weights, self._release = address, channel, weights, release
        self.watch, self.receive = channel.watch, channel.receive

    @property
    def ended(self) -> bool:
        """See `RoleHandle`."""
        return bool(self._channel.ended or self._channel.fault)

    def send(
        self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """See `RoleHandle`; weights are sent before the command to load them."""
        if kind == "update_weights":
            copied = send_pieces(self._channel, self._weights, metadata["manifest"], {})
            metadata = {**metadata, "manifest": copied}
        self._channel.send(kind, metadata, arrays)

    def exit_reason(self) -> str:
        """See `RoleHandle`."""
        if not self.ended:
            return ""
        return self._channel.fault or (
            f"{_written(self._address)} closed the connection, which it does if the worker's token differs"
        )

    def log_tail(self) -> str:
        """Return nothing: the other machine has the log."""
        return ""

    def kill(self) -> None:
        """Close the connection, whereupon the worker waits for another one."""
        self._channel.close()
        self._release()


class RemoteWorkers:
    """Starts workers at addresses where `millrace serve-worker` listens; see `RoleStarter`.

    Args:
        addresses: at least as many as workers; further ones replace those that are lost.
        token: that of each `millrace serve-worker`.
        files: of the engine; see `EngineSettings`.
        connect_s: timeout for a worker that is free, in seconds.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        token: str,
        files: Mapping[str, bytes],
        *,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._free, self._lock = list(addresses), threading.Lock()
        self._token, self._files, self._connect_s = token, files, connect_s
        self._closed = threading.Event()

    def __call__(self, name: str, weights: int, slots: Sequence[int]) -> RemoteWorker:
        """Start a worker at an address that is free; see `RoleStarter`."""
        deadline_s, problem = time.monotonic() + self._connect_s, "no address is free"
        while not self._closed.is_set():
            with self._lock:
                address = self._free.pop(0) if self._free else None
            if address is not None:
                try:
                    channel = self._start(address, name, len(slots))
                    return RemoteWorker(address, channel, weights, partial(self._release, address))
                except OSError as error:
                    problem = f"{_written(address)}: {error}"
                    self._release(address)
            if time.monotonic() > deadline_s:
                raise ConnectionError(
                    f"waited {self._connect_s:g} s for a `millrace serve-worker` for {name}; {problem}"
                )
            self._closed.wait(RETRY_S)
        raise ConnectionError(f"{name} was not started, since the engine was closed")

    def close(self) -> None:
        """End the waits for a worker."""
        self._closed.set()

    def _release(self, address: Address) -> None:
        with self._lock:
            self._free.append(address)

    def _start(self, address: Address, name: str, num_slots: int) -> Channel:
        connection = socket.create_connection(address, timeout=HELLO_S)
        try:
            nonce = _received(connection)
            _keep_alive(connection)
        except OSError:
            connection.close()
            raise
        channel = Channel(connection, _key(self._token, nonce), ROLE_REPORTS)
        files = {path: np.frombuffer(data, np.uint8) for path, data in self._files.items()}
        channel.send("start", {"name": name, "num_slots": num_slots}, files)
        return channel


class RemoteRoleWorker(PrefillDecodeWorker):
    """A worker that receives weights over its connection, and fetches blocks over the network."""

    def __init__(
        self, engine: PagedEngine, channel: Channel, weights: int, slots: Sequence[int], network: KvNetwork
    ) -> None:
        super().__init__(engine, channel, weights, slots, network=network)
        self._memory = weights
        self._handlers["weights"] = self._receive_piece
        self._handlers["start"] = self._refuse_start

    def _receive_piece(self, frame: Frame) -> None:
        write_piece(self._memory, frame)
        # A long transfer must not exceed the timeout of the worker's messages.
        self._send("heartbeat")

    def _refuse_start(self, frame: Frame) -> None:
        raise FrameError("a worker was started twice over one connection")


def serve_workers(
    listening: socket.socket, token: str, *, threads: int, tell: Callable[[str], object]
) -> None:
    """Be a worker of one serving process after the other, without end; `tell` gets what happens.

    Raises:
        ModelError, DataError, SetupError: this machine cannot build the engine.
    """
    torch.set_num_threads(threads)
    while True:
        connection, address = listening.accept()
        peer = _written(address)
        try:
            with closing(connection):
                serve_connection(connection, token, tell)
        except (FrameError, OSError) as error:
            tell(f"{peer}: {error}")
        else:
            tell(f"{peer} closed the connection")


def serve_connection(connection: socket.socket, token: str, tell: Callable[[str], object]) -> None:
    """Be a worker of the serving process at the other end until it closes the connection.

    Raises:
        FrameError: the peer has another token, or breaks the protocol.
        OSError: the connection ended before the worker was started.
    """
    nonce = secrets.token_bytes(KEY_BYTES)
    connection.settimeout(HELLO_S)
    connection.sendall(nonce)
    _keep_alive(connection)
    own, peer = connection.getsockname()[0], connection.getpeername()[0]
    channel = Channel(connection, _key(token, nonce), REMOTE_COMMANDS)
    start = _first_frame(channel)
    tell(f"{start.metadata['name']} of {_written(connection.getpeername())}")
    # By the interface of this connection the other workers are reached, too.
    os.environ.update(gloo_variables({**os.environ, "MASTER_ADDR": peer}))
    with tempfile.TemporaryDirectory(prefix="millrace-engine-") as folder:
        write_files({name: data.tobytes() for name, data in start.arrays.items()}, Path(folder))
        engine = open_engine(Path(folder))
    handles = [os.memfd_create("millrace-worker") for _ in range(1 + start.metadata["num_slots"])]
    try:
        RemoteRoleWorker(engine, channel, handles[0], handles[1:], KvNetwork(own)).serve()
    finally:
        for handle in handles:
            os.close(handle)


def _first_frame(channel: Channel) -> Frame:
    deadline_s = time.monotonic() + HELLO_S
    while not channel.ended and (left_s := deadline_s - time.monotonic()) > 0:
        try:
            frames = channel.wait(left_s)
        except FrameError:
            raise FrameError("the peer has another token (MILLRACE_WORKER_TOKEN)") from None
        if not frames:
            continue
        if frames[0].kind != "start" or len(frames) > 1:
            raise FrameError(f"the peer began with {frames[0].kind} and not with the worker's settings")
        return frames[0]
    raise ConnectionError(f"waited {HELLO_S:g} s for the worker's settings, which did not come")


def _received(connection: socket.socket) -> bytes:
    """Receive the first bytes of a worker; ConnectionError if it has none to send."""
    try:
        nonce = connection.recv(KEY_BYTES, socket.MSG_WAITALL)
    except TimeoutError:
        nonce = b""
    if len(nonce) < KEY_BYTES:
        raise ConnectionError(
            f"it did not begin to serve this process within {HELLO_S:g} s; does it serve another one?"
        )
    return nonce


def _key(token: str, nonce: bytes) -> bytes:
    return blake2b(nonce, key=blake2b(token.encode()).digest(), digest_size=KEY_BYTES).digest()


def _keep_alive(connection: socket.socket) -> None:
    """Have the connection end where the other machine has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, UNREACHABLE_S // 3),
        (socket.TCP_KEEPINTVL, UNREACHABLE_S // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * UNREACHABLE_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _written(address: Sequence[str | int]) -> str:
    return f"{address[0]}:{address[1]}"
