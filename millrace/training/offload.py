"""Offload a trainer's tensors from device memory, and restore them.

Tensor objects stay valid: parameters, optimizer states, FSDP2's views and all other references to the
storages hold the same numbers after the restore. Between offload and restore, nothing may be computed with
them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from millrace.training.optimizer import WeightOptimizer
from millrace.transport.fingerprint import digest

# Name of the owner, its module, and its optimizer if it is trained.
Owner = tuple[str, nn.Module, WeightOptimizer | None]


class OffloadError(RuntimeError):
    """Restored numbers differ from the offloaded ones, or memory could not be released."""


class Shelf(Protocol):
    """Storage for offloaded numbers."""

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the numbers over earlier ones, and free their memory; without room OSError, no change."""
        ...

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Allocate the memory again and fill it with the stored numbers."""
        ...


class HostShelf:
    """Host memory, for tensors on an accelerator; with pinned pages it copies without the host."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copies: list[Tensor] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Start all copies at once and await them together."""
        sizes = [storage.nbytes() for storage in storages]
        if [len(copy) for copy in self._copies] != sizes:
            # Pinning takes longer than a copy, so pages are reused.
            self._copies = [torch.empty(n, dtype=torch.uint8, pin_memory=self._pinned) for n in sizes]
        for copy, storage in zip(self._copies, storages, strict=True):
            copy.copy_(_bytes(storage), non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        for storage in storages:
            storage.resize_(0)
        if self._pinned:
            # Memory in torch's cache is not available to other libraries and processes.
            torch.cuda.empty_cache()

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy back; later work on the accelerator waits for it."""
        for copy, storage in zip(self._copies, storages, strict=True):
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)


class FileShelf:
    """An unnamed temporary file, for tensors in host memory; a folder in memory gains nothing.

    A storage that numpy has accessed cannot be resized. So its address stays, and only its whole pages are
    returned to the system.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Write to the file; OffloadError if the system did not release the memory."""
        self._file.seek(0)
        for storage in storages:
            self._file.write(_bytes(storage).numpy().data)
        self._file.flush()
        for storage in storages:
            _drop_pages(storage.data_ptr(), storage.nbytes())

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Read the file back; writing allocates the memory again."""
        self._file.seek(0)
        for storage in storages:
            self._file.readinto(_bytes(storage).numpy().data)


class Offload:
    """All tensors of some models and their optimizers on one device type, present or offloaded."""

    def __init__(self, owners: Sequence[Owner], shelf: Shelf, *, device: str) -> None:
        self._owners, self._shelf, self._device = owners, shelf, device
        self._away: list[tuple[str, UntypedStorage, str]] = []

    def sleep(self) -> None:
        """Offload everything; a second call does nothing.

        Raises:
            OSError: there is no room on the shelf; nothing was offloaded.
            OffloadError: the system did not release the memory.
        """
        if not self._away:
            there = [(name, storage, digest(_bytes(storage))) for name, storage in self._there()]
            self._shelf.put([storage for _, storage, _ in there])
            self._away = there

    def wake(self) -> None:
        """Restore everything, OffloadError if a checksum differs; a second call does nothing."""
        if not self._away:
            return
        away, self._away = self._away, []
        self._shelf.take([storage for _, storage, _ in away])
        wrong = [name for name, storage, before in away if digest(_bytes(storage)) != before]
        if wrong:
            raise OffloadError(
                f"{len(wrong)} of {len(away)} tensors that had left the device's memory came back with other "
                f"bits, the first being {wrong[0]}; look for a fault of memory or disk, then resume the run"
            )

    def _there(self) -> Iterator[tuple[str, UntypedStorage]]:
        seen = set()
        for owner in self._owners:
            for name, tensor in held_tensors(owner):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if storage.device.type == self._device and storage.nbytes() and key not in seen:
                    seen.add(key)
                    yield name, storage


def held_tensors(owner: Owner) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's weights, gradients and optimizer states by name; of a subclass, its inner tensors."""
    whose, module, optimizer = owner
    state = {} if optimizer is None else optimizer.state
    for name, parameter in module.named_parameters():
        kinds = {"weight": parameter, "gradient": parameter.grad, **state.get(parameter, {})}
        for kind, tensor in kinds.items():
            if isinstance(tensor, Tensor):
                yield from ((f"{whose}'s {kind} {name}", part) for part in _plain(tensor))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        # A sharded one is made of its mesh too.
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from _plain(part)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _drop_pages(address: int, num_bytes: int) -> None:
    """Release the whole pages of some memory; they read as 0 until they are written."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start >= end:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(end - start)
    if libc.madvise(ctypes.c_void_p(start), length, mmap.MADV_DONTNEED):
        why = os.strerror(ctypes.get_errno())
        raise OffloadError(f"{end - start} bytes of memory cannot be given back: {why}; remove colocated")
