"""The ranks of a run, and the little they tell each other besides gradients.

Every rank runs the same program on the same numbers, so that each decision is the same on all of them. What
only one may do (console, files), the first rank does. What must be the same and is not computed by all
(completions, rewards, the user's wish to leave) is handed around here, as bytes that hold no code.
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

# What a rank may wait for another: it may be sampling, scoring or saving meanwhile.
PATIENCE = timedelta(hours=1)


class RanksError(ValueError):
    """Ranks that do not fit the recipe; the message says what to change."""


class Ranks:
    """All ranks of a run; a run of one process has one, which waits for nobody.

    Attributes:
        waiting: entered while others are waited for.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """The ranks as one of them sees them; with more than one the process group exists.

        Args:
            rank: which one this is.
            size: how many there are.
        """
        self.rank, self.size = rank, size
        # Of its own: what is told here lies in host memory, whatever gradients travel by.
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if size > 1 else None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def first(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank gave, by rank, on every rank."""
        if self._group is None:
            return [mine]
        length_R = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self.waiting():
            dist.all_gather(length_R, torch.tensor([len(mine)]), group=self._group)
            longest = max(int(length) for length in length_R)
            padded = _bytes(mine.ljust(longest, b"\0"))
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._group)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, length_R, strict=True)]

    def hand_out(self, data: bytes = b"") -> bytes:
        """What the first rank gives, on every rank; the others give nothing."""
        if self._group is None:
            return data
        length = torch.tensor([len(data)])
        with self.waiting():
            dist.broadcast(length, 0, group=self._group)
            told = _bytes(data) if self.first else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(told, 0, group=self._group)
        return data if self.first else told.numpy().tobytes()

    def share(self, text: str) -> str:
        """What the first rank says; the others' words are dropped."""
        return self.hand_out(text.encode() if self.first else b"").decode()

    def agree(self, wish: bool) -> bool:
        """Whether any rank wishes it."""
        return b"1" in self.gather(b"1" if wish else b"0")

    def threads(self) -> list[int]:
        """Threads that torch computes with, by rank, on every rank."""
        return [int(told) for told in self.gather(str(torch.get_num_threads()).encode())]

    def since(self, started_s: float) -> float:
        """When the first rank started, by this rank's `time.monotonic()`, but for the time of a message.

        Args:
            started_s: when this one did.
        """
        # Whoever came late would count the time since then twice.
        self.wait()
        return time.monotonic() - float(self.share(str(time.monotonic() - started_s)))

    def wait(self) -> None:
        """Until every rank is here."""
        self.gather(b"")


def given_ranks() -> tuple[int, int] | None:
    """Rank and number of ranks, as torchrun and our own launcher give them; None outside of both.

    Raises:
        RanksError: the environment names one and not the other, or no number.
    """
    names = ("RANK", "WORLD_SIZE")
    given = [os.environ.get(name) for name in names]
    if given == [None, None]:
        return None
    try:
        rank, size = (int(value or "") for value in given)
    except ValueError:
        told = ", ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
        raise RanksError(f"the environment says {told}; a rank needs both, as torchrun sets them") from None
    return rank, size


def device_of(rank: int, num_devices: int) -> int:
    """Which of the devices that a rank sees is its own: one each; device 0 where it sees no other."""
    return int(os.environ.get("LOCAL_RANK", rank)) % num_devices


def open_store(host: str) -> TCPStore:
    """The store by which ranks find each other, on a free port of one address alone."""
    # Left to itself, it listens on every address of the machine.
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@contextmanager
def joined(num_ranks: int, *, device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run, as the environment names them, until the end of the block.

    Args:
        num_ranks: ranks that the recipe asks for.
        device: where the weights are.

    Raises:
        RanksError: the environment and the recipe do not agree.
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
    dist.init_process_group(backend, timeout=PATIENCE)
    ranks = Ranks(rank, size)
    yield ranks
    # Nobody leaves while another still talks to it. After an error nobody waits.
    ranks.wait()
    dist.destroy_process_group()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def lost_others(error: BaseException) -> bool:
    """Whether an error says that another rank has gone, rather than that something is wrong here."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
