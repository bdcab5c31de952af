"""KV transfer between machines by `torch.distributed`: bytes of one worker's slot to a slot of another.

The sending worker offers the bytes at an address, which travels in the manifest, and the receiving one
fetches them. Each transfer has a process group of these two alone and ends with it, so that the loss of a
worker is no matter of other transfers. Both ends run in threads, beside the steps of the engines. A peer is
not authenticated: the importing engine verifies each block against the manifest, and whoever reaches the
port can read them. X = bytes of a transfer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup, ProcessGroupGloo

from millrace.processes.wake import Wake

LOG = logging.getLogger("millrace.engines.kv_network")
# Timeouts of each step of a transfer: until somebody fetches an offer, and until the bytes have come.
OFFER_S, FETCH_S = 60.0, 30.0


class KvNetworkError(RuntimeError):
    """Blocks cannot be offered; the message names the reason."""


class KvNetwork:
    """One worker's end. `fileno` is readable once a fetch has ended, until `ended` is called.

    Args:
        host: address of this machine by which the other workers reach it.
        fetch_s: timeout of each step of a fetch, in seconds.
    """

    def __init__(self, host: str, *, fetch_s: float = FETCH_S) -> None:
        self._host, self._fetch_s = host, fetch_s
        self._wake, self._lock, self._closed = Wake(), threading.Lock(), False
        self._ended: list[tuple[int, str]] = []

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._wake.fileno()

    def offer(self, data_X: np.ndarray) -> tuple[str, int]:
        """Offer bytes, which must not change, to one worker; return the address to fetch them from.

        Raises:
            KvNetworkError: this machine has no port for it.
        """
        try:
            # On a free port.
            store = TCPStore(
                self._host, 0, is_master=True, timeout=timedelta(seconds=OFFER_S), wait_for_workers=False
            )
        except RuntimeError as error:
            raise KvNetworkError(f"no port for a KV transfer at {self._host}: {_first_line(error)}") from None
        threading.Thread(target=_send, args=(store, data_X), daemon=True).start()
        return self._host, store.port

    def fetch(self, slot: int, address: Sequence[str | int], into_X: np.ndarray) -> None:
        """Begin to fetch what is offered at an address; `ended` reports the end."""
        arguments = slot, (str(address[0]), int(address[1])), into_X
        threading.Thread(target=self._fetch, args=arguments, daemon=True).start()

    def ended(self) -> list[tuple[int, str]]:
        """Return slot and problem, empty without one, of each fetch that has ended since the last call."""
        with self._lock:
            self._wake.clear()
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Release the descriptor; a fetch that is under way is reported no more."""
        with self._lock:
            self._closed = True
            self._wake.close()

    def _fetch(self, slot: int, address: tuple[str, int], into_X: np.ndarray) -> None:
        timeout, problem = timedelta(seconds=self._fetch_s), ""
        try:
            group = _group_of_two(TCPStore(*address, is_master=False, timeout=timeout), 1, timeout)
            group.recv([torch.from_numpy(into_X)], 0, 0).wait()
            # The sender may close its end once this has come.
            group.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait()
        except RuntimeError as error:
            problem = (
                f"{len(into_X):,} bytes did not come from {address[0]}:{address[1]}, "
                f"with {self._fetch_s:g} s for each step: {_first_line(error)}"
            )
        with self._lock:
            if not self._closed:
                self._ended.append((slot, problem))
                self._wake.set()


def _send(store: TCPStore, data_X: np.ndarray) -> None:
    try:
        group = _group_of_two(store, 0, timedelta(seconds=OFFER_S))
        group.send([torch.from_numpy(data_X)], 1, 0).wait()
        group.recv([torch.zeros(1, dtype=torch.uint8)], 1, 0).wait()
    except RuntimeError as error:
        # The receiving worker reports what it did not get; a prompt that was aborted is not fetched.
        LOG.debug("a KV transfer was not fetched: %s", error)


def _group_of_two(store: TCPStore, rank: int, timeout: timedelta) -> ProcessGroup:
    """Return a process group that is not registered, as `torch.distributed._dist2` makes it.

    RuntimeError if the other rank does not come.
    """
    group = ProcessGroup(store, rank, 2)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, ProcessGroupGloo(store, rank, 2, timeout))
    return group


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
