"""The ranks of a run, and their communication besides gradients.

Every rank runs the same program on the same data, so each decision is the same on all ranks. Rank 0 alone
writes to console and files. Values that must be equal but are not computed by all ranks (completions,
rewards, a stop request) are exchanged here as bytes, never as pickles.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from millrace.distributed.network import choose_interface

# A rank waits for others this many times as long as a phase may take: rank 0 may save, and then sample.
PHASES = 2
# Torch's own.
STORE_WAIT = timedelta(seconds=300)


class RanksError(ValueError):
    """The ranks do not match the recipe; the message names the remedy."""


class Ranks:
    """All ranks of a run; with a single rank nothing is communicated.

    With more than one, the default process group must exist. A wait of more than `timeout_s` for another rank
    is an error that `lost_others` recognizes.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, timeout_s: float = 3600.0) -> None:
        self.rank, self.size = rank, size
        # A separate gloo group, because the data is in host memory, whatever the backend for gradients.
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes console and files."""
        return self.rank == 0

    def report_waits(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter a context that `waiting` returns whenever this rank waits for others."""
        self._waiting = waiting

    def all_gather(self, mine: bytes) -> list[bytes]:
        """All-gather bytes, by rank."""
        if self._group is None:
            return [mine]
        length_R = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._waiting():
            dist.all_gather(length_R, torch.tensor([len(mine)]), group=self._group)
            longest = max(int(length) for length in length_R)
            padded = _bytes(mine.ljust(longest, b"\0"))
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._group)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, length_R, strict=True)]

    def broadcast(self, data: bytes = b"") -> bytes:
        """Broadcast bytes from rank 0; the argument of other ranks is ignored."""
        if self._group is None:
            return data
        length = torch.tensor([len(data)])
        with self._waiting():
            dist.broadcast(length, 0, group=self._group)
            received = _bytes(data) if self.first else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(received, 0, group=self._group)
        return data if self.first else received.numpy().tobytes()

    def broadcast_text(self, text: str) -> str:
        """Broadcast a string from rank 0; the argument of other ranks is ignored."""
        return self.broadcast(text.encode() if self.first else b"").decode()

    def any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank, on every rank."""
        return b"1" in self.all_gather(b"1" if value else b"0")

    def threads(self) -> list[int]:
        """Return the number of torch threads of each rank, on every rank."""
        return [int(number) for number in self.all_gather(str(torch.get_num_threads()).encode())]

    def since(self, started_s: float) -> float:
        """Return the start time of rank 0 on this rank's `time.monotonic()`, up to a message's latency."""
        # Without this barrier a late rank would count its delay twice.
        self.barrier()
        return time.monotonic() - float(self.broadcast_text(str(time.monotonic() - started_s)))

    def barrier(self) -> None:
        """Wait for all ranks (barrier)."""
        self.all_gather(b"")


def given_ranks() -> tuple[int, int] | None:
    """Read rank and world size as torchrun or our launcher set them in the environment; None if neither is.

    One without the other, or no number, is a RanksError.
    """
    names = ("RANK", "WORLD_SIZE")
    given = [os.environ.get(name) for name in names]
    if given == [None, None]:
        return None
    try:
        rank, size = (int(value or "") for value in given)
    except ValueError:
        found = ", ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
        raise RanksError(f"the environment has {found}; a rank needs both, as torchrun sets them") from None
    return rank, size


def device_of(rank: int, num_devices: int) -> int:
    """Return the index of a rank's own device, by LOCAL_RANK if set; 0 if only one device is visible."""
    return int(os.environ.get("LOCAL_RANK", rank)) % num_devices


def open_store(host: str, timeout: timedelta = STORE_WAIT) -> TCPStore:
    """Open a rendezvous store on a free port of one address; OSError if there is none."""
    # By default it would listen on every address of the machine.
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


@contextmanager
def joined(num_ranks: int, *, device: torch.device, phase_s: float) -> Iterator[Ranks]:
    """Join the process group of the environment for the block.

    Ranks wait at most `PHASES * phase_s` for each other, so that they end if a machine vanishes without a
    last packet.

    Raises:
        RanksError: it has not `num_ranks` ranks.
        NetworkError: see `gloo_variables`.
    """
    given = given_ranks()
    rank, size = given if given is not None else (0, 1)
    if size != num_ranks:
        raise RanksError(
            f"the recipe's mesh asks for {num_ranks} ranks, and {size} were started; make "
            "the mesh's sizes, multiplied, and the number of processes the same"
        )
    if size == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device_of(rank, torch.cuda.device_count()))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    choose_interface()
    dist.init_process_group(backend, timeout=timedelta(seconds=PHASES * phase_s))
    ranks = Ranks(rank, size, timeout_s=PHASES * phase_s)
    yield ranks
    # No rank leaves while others still communicate with it. After an error there is no barrier.
    ranks.barrier()
    dist.destroy_process_group()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def lost_others(error: BaseException) -> bool:
    """Whether an error means the loss of another rank rather than a local failure."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
