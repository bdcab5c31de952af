"""Weights through memory that processes of one machine share and that has no name.

The trainer writes each version over the last one, and every sampler maps the same pages. Nothing of it can be
left behind: it goes with the last process that holds it, however that one ends. The size of `/dev/shm`, which
in a container is often 64 MB, does not limit it. Linux only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.fingerprint import digest
from millrace.transport.folder import give_size
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import Note, Parcel

# No dtype is wider, and a cache line is as long.
ALIGNMENT = 64


class SharedWeights:
    """The trainer's end.

    Attributes:
        handle: descriptor of the memory, for a sampler's process to inherit.
    """

    def __init__(self) -> None:
        """Memory that holds nothing yet."""
        self.handle = os.memfd_create("millrace-weights")
        self._memory = torch.empty(0, dtype=torch.uint8)

    def write(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        canary: Callable[[], Canary] | None = None,
    ) -> Note:
        """Write a version over the last one, which nobody may be reading.

        Args:
            named_tensors: the weights, each name once; they may change again once this has returned.
            version: of them.
            canary: of these weights, asked for when they have been taken; None for none.

        Returns:
            where each weight lies, its fingerprint and the canary, for `MappedWeights`.

        Raises:
            WeightSyncError: there is no room, or a name was given twice.
        """
        places: dict[str, tuple[str, list[int], int]] = {}
        digests: dict[str, str] = {}
        end = 0
        for name, tensor in named_tensors:
            if name in places:
                raise WeightSyncError(f"weight {name} was given twice")
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + tensor.nbytes
            self._reserve(end)
            digests[name] = digest(tensor, self._memory[begin:end])
            places[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin)
        asked = None if canary is None else canary().note()
        return {"version": version, "bytes": end, "tensors": places, "fingerprint": digests, "canary": asked}

    def close(self) -> None:
        """Let go of the memory; a sampler that still reads keeps its pages until it is done."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.handle)

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self._memory):
            give_size(self.handle, num_bytes, "memory that processes share")
            self._memory = _mapped(self.handle, num_bytes)


class MappedWeights:
    """A sampler's end: the carrier of a `sync.WeightReceiver`.

    Attributes:
        note: what `SharedWeights.write` gave of the version to take; set it before each `take`.
    """

    def __init__(self, handle: int, answer: Callable[[Note], None]) -> None:
        """Nothing is mapped yet.

        Args:
            handle: descriptor of the memory.
            answer: tells the trainer what became of a version.
        """
        self.note: Note = {}
        self._handle, self._answer = handle, answer
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self) -> Parcel:
        """What `note` describes; see `sync.Incoming`."""
        note = self.note
        # Whoever ordered this has it taken again, from the same memory.
        opening = {"version": note["version"], "again": False, "delta": False}
        proof = {name: note[name] for name in ("fingerprint", "canary")}
        return Parcel(opening, self._read(note), lambda: proof)

    def answer(self, note: Note) -> None:
        """Tell the trainer; see `sync.Incoming`."""
        self._answer(note)

    def _read(self, note: Note) -> Iterator[tuple[str, Tensor]]:
        if note["bytes"] > len(self._memory):
            held = os.fstat(self._handle).st_size
            if held < note["bytes"]:
                raise WeightSyncError(f"the shared memory holds {held} bytes; {note['bytes']} were sent")
            self._memory = _mapped(self._handle, note["bytes"])
        for name, (word, shape, begin) in note["tensors"].items():
            dtype = getattr(torch, word)
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            yield name, self._memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def _mapped(handle: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, num_bytes), dtype=torch.uint8)
