"""What a trainer holds, out of the device's memory and back into it.

Tensors stay what they are: parameters, the keys of an optimizer's state, FSDP2's own views and whatever else
points at their storages is valid again when the numbers are back; only nothing may be computed meanwhile.
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

from millrace.transport.fingerprint import digest

# Whose tensors they are, the module that holds them, and the optimizer with their states, if they learn.
Owner = tuple[str, nn.Module, torch.optim.Optimizer | None]


class OffloadError(RuntimeError):
    """What came back is not what left, or could not leave."""


class Shelf(Protocol):
    """Where numbers wait."""

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the numbers here, in place of those before, and give their memory back.

        Raises:
            OSError: there is no room; everything is still where it was.
        """
        ...

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Take the memory again and fill it with what was put."""
        ...


class HostShelf:
    """The host's memory, for what lies on an accelerator."""

    def __init__(self, *, pinned: bool) -> None:
        """Nothing waits here.

        Args:
            pinned: whether its pages stay where they are, so that an accelerator copies without the host.
        """
        self._pinned = pinned
        self._copies: list[Tensor] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """See `Shelf`. All copies are asked for at once, and waited for together."""
        sizes = [storage.nbytes() for storage in storages]
        if [len(copy) for copy in self._copies] != sizes:
            # Pinning takes longer than a copy, so pages are kept from one time to the next.
            self._copies = [torch.empty(n, dtype=torch.uint8, pin_memory=self._pinned) for n in sizes]
        for copy, storage in zip(self._copies, storages, strict=True):
            copy.copy_(_bytes(storage), non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        for storage in storages:
            storage.resize_(0)
        if self._pinned:
            # What torch would keep for itself, other libraries and processes miss.
            torch.cuda.empty_cache()

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """See `Shelf`. What the accelerator does next waits for the copies by itself."""
        for copy, storage in zip(self._copies, storages, strict=True):
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)


class FileShelf:
    """A file without a name, which ends with the process, for what lies in the host's memory.

    A storage whose memory numpy has seen cannot be resized. So only its whole pages are given back to the
    system, and its address stays.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing waits here.

        Args:
            folder: on a disk; one that lies in memory gains nothing.
        """
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """See `Shelf`.

        Raises:
            OffloadError: the system keeps the memory.
        """
        self._file.seek(0)
        for storage in storages:
            self._file.write(_bytes(storage).numpy().data)
        self._file.flush()
        for storage in storages:
            _drop_pages(storage.data_ptr(), storage.nbytes())

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """See `Shelf`; memory is there again as it is written to."""
        self._file.seek(0)
        for storage in storages:
            self._file.readinto(_bytes(storage).numpy().data)


class Offload:
    """Everything that some models and their optimizers hold on one kind of device, there or away."""

    def __init__(self, owners: Sequence[Owner], shelf: Shelf, *, device: str) -> None:
        """All of it is there.

        Args:
            owners: whose tensors leave; one that several hold leaves once.
            shelf: where they wait.
            device: type of the device they leave; what lies elsewhere stays.
        """
        self._owners, self._shelf, self._device = owners, shelf, device
        self._away: list[tuple[str, UntypedStorage, str]] = []

    def sleep(self) -> None:
        """Give the memory back; nothing happens where that is done already.

        Raises:
            OSError: there is no room on the shelf; everything is still there.
            OffloadError: the system keeps the memory.
        """
        if not self._away:
            there = [(name, storage, digest(_bytes(storage))) for name, storage in self._there()]
            self._shelf.put([storage for _, storage, _ in there])
            self._away = there

    def wake(self) -> None:
        """Take the memory again and the numbers back; nothing happens where they are there.

        Raises:
            OffloadError: a checksum is not what it was.
        """
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
        """Every storage once, named by the first tensor in it."""
        seen = set()
        for owner in self._owners:
            for name, tensor in held_tensors(owner):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if storage.device.type == self._device and storage.nbytes() and key not in seen:
                    seen.add(key)
                    yield name, storage


def held_tensors(owner: Owner) -> Iterator[tuple[str, Tensor]]:
    """Weights, gradients and optimizer states as this rank keeps them, such as `the policy's weight lm_head`.

    Of a tensor that is made of others (sharded, quantised) those others.
    """
    whose, module, optimizer = owner
    for name, parameter in module.named_parameters():
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        kinds = {"weight": parameter, "gradient": parameter.grad, **state}
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
    """Give the whole pages of some memory back; until they are written to they read as 0."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start >= end:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(end - start)
    if libc.madvise(ctypes.c_void_p(start), length, mmap.MADV_DONTNEED):
        why = os.strerror(ctypes.get_errno())
        raise OffloadError(f"{end - start} bytes of memory cannot be given back: {why}; remove take_turns")
