"""KV transfer between machines by `torch.distributed`: bytes of one worker's slot to a slot of another.

The sending worker offers the bytes at an address with a key, which travel in the manifest over connections
with a token, and the receiving one fetches them: it sends the key, and receives. Each transfer has a process
group of these two alone and ends with it, so that the loss of a worker is no matter of other transfers. Both
ends run in threads, beside the steps of the engines. The importing engine verifies each block against the
manifest. Nothing is encrypted. X = bytes of a transfer.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup, ProcessGroupGloo

from millrace.distributed.ranks import open_store
from millrace.processes.wake import Wake

# Host, port and key, in hexadecimal digits.
Offer = tuple[str, int, str]
KEY_BYTES = 32
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

    def offer(self, data_X: np.ndarray) -> Offer:
        """Offer bytes, which must not change, to one worker.

        Raises:
            KvNetworkError: this machine has no port for it.
        """
        try:
            store = open_store(self._host, timedelta(seconds=OFFER_S))
        except (OSError, RuntimeError) as error:
            raise KvNetworkError(f"no port for a KV transfer at {self._host}: {_first_line(error)}") from None
        key = secrets.token_bytes(KEY_BYTES)
        threading.Thread(target=_send, args=(store, key, data_X), daemon=True).start()
        return self._host, store.port, key.hex()

    def fetch(self, slot: int, offer: Sequence[str | int], into_X: np.ndarray) -> None:
        """Begin to fetch what is offered; `ended` reports the end."""
        host, port, key = offer
        arguments = slot, (str(host), int(port), str(key)), into_X
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

    def _fetch(self, slot: int, offer: Offer, into_X: np.ndarray) -> None:
        (host, port, key), timeout, problem = offer, timedelta(seconds=self._fetch_s), ""
        try:
            group = _group_of_two(TCPStore(host, port, is_master=False, timeout=timeout), 1, timeout)
            group.send([torch.frombuffer(bytearray.fromhex(key), dtype=torch.uint8)], 0, 0).wait()
            group.recv([torch.from_numpy(into_X)], 0, 0).wait()
            # The sender may close its end once this has come.
            group.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait()
        except RuntimeError as error:
            problem = (
                f"{len(into_X):,} bytes did not come from {host}:{port}, "
                f"with {self._fetch_s:g} s for each step: {_first_line(error)}"
            )
        with self._lock:
            if not self._closed:
                self._ended.append((slot, problem))
                self._wake.set()


def _send(store: TCPStore, key: bytes, data_X: np.ndarray) -> None:
    sent_X = np.zeros(KEY_BYTES, np.uint8)
    try:
        group = _group_of_two(store, 0, timedelta(seconds=OFFER_S))
        group.recv([torch.from_numpy(sent_X)], 1, 0).wait()
        if not hmac.compare_digest(sent_X.tobytes(), key):
            LOG.warning("a peer without the key of a KV transfer asked for it at port %d", store.port)
            return
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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
