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
from millrace.transport.delta import apply_changes, changes
from millrace.transport.fingerprint import digest
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import Note, Parcel

# No dtype is wider, and a cache line is as long.
ALIGNMENT = 64


class SharedWeights:
    """The trainer's end.

    Attributes:
        handle: descriptor of the memory, for a sampler's process to inherit.
        metrics: where changes were written, `sync/payload_bytes` that must travel to a sampler elsewhere that
            holds the last version, and `sync/payload_share`, of the bytes of all weights.
    """

    def __init__(self, *, delta: bool = False) -> None:
        """Memory that holds nothing yet.

        Args:
            delta: whether to write what changed since the last version too, behind the weights.
        """
        self.handle = os.memfd_create("millrace-weights")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._delta = delta
        self.metrics: dict[str, float] = {}
        # What lies there; None while nothing whole does.
        self._last: Note | None = None

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
            where each weight lies, its fingerprint and the canary, for `MappedWeights`; as `changes` the last
            version (`base`), and of weights of which not all must travel where that lies (`packed`), or None.

        Raises:
            WeightSyncError: there is no room, or a name was given twice.
        """
        places: dict[str, tuple[str, list[int], int]] = {}
        digests: dict[str, str] = {}
        changed = None if self._last is None or not self._delta else _Changes(self._last)
        self._last, end = None, 0
        for name, tensor in named_tensors:
            if name in places:
                raise WeightSyncError(f"weight {name} was given twice")
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + tensor.nbytes
            self._reserve(end)
            places[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin)
            there = tensor.detach().cpu()
            if changed is not None:
                # What lies there is the last version still.
                packed = changed.find(name, places[name], self._memory[begin:end], there)
                if packed is not None:
                    self._reserve(changed.end)
                    self._memory[changed.end - len(packed) : changed.end] = packed
            digests[name] = digest(there, self._memory[begin:end])
        asked = None if canary is None else canary().note()
        told, self.metrics = None, {}
        # Where other weights came than the last ones, nobody can have held these before.
        if changed is not None and places == changed.last["tensors"]:
            told = {"base": changed.last["version"], "packed": changed.packed}
            share = changed.num_bytes / max(end, 1)
            self.metrics = {"sync/payload_bytes": changed.num_bytes, "sync/payload_share": share}
        proof = {"fingerprint": digests, "canary": asked}
        self._last = {"version": version, "bytes": end, "tensors": places, "changes": told, **proof}
        return self._last

    def close(self) -> None:
        """Let go of the memory; a sampler that still reads keeps its pages until it is done."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.handle)

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self._memory):
            _give_size(self.handle, num_bytes)
            self._memory = _mapped(self.handle, num_bytes)


class _Changes:
    """What changed since the version that lies in the memory, weight by weight.

    Attributes:
        last: the note of that version.
        packed: where lies what leads to the new weights, for those of which it is less than the whole.
        num_bytes: that must travel, of weights and changes.
        end: of all that was written.
    """

    def __init__(self, last: Note) -> None:
        """Nothing is known yet."""
        self.last = last
        self.packed: dict[str, list[int]] = {}
        # Behind the weights, for as long as they lie where the last ones do.
        self.num_bytes, self.end = 0, int(last["bytes"])

    def find(self, name: str, place: tuple[str, list[int], int], held: Tensor, new: Tensor) -> Tensor | None:
        """What is to be written up to the new `end`, uint8 [num_bytes]; None where a weight travels whole."""
        self.num_bytes += len(held)
        if self.last["tensors"].get(name) != place:
            return None
        packed = changes(held.view(new.dtype).reshape(new.shape), new)
        if packed is None:
            return None
        begin = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = begin + len(packed)
        self.packed[name] = [begin, self.end]
        self.num_bytes += len(packed) - len(held)
        return packed


class MappedWeights:
    """A sampler's end: the carrier of a `sync.WeightReceiver`.

    Attributes:
        note: what `SharedWeights.write` gave of the version to take; set it before each `take`. Where the
            memory is this side's own and got changes, `patch` in it says of which weights, and where.
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
        proof = {name: note[name] for name in ("fingerprint", "canary")}
        return Parcel(note["version"], self._read(note), proof)

    def answer(self, note: Note) -> None:
        """Tell the trainer; see `sync.Incoming`."""
        self._answer(note)

    def _read(self, note: Note) -> Iterator[tuple[str, Tensor]]:
        patch = note.get("patch", {})
        end = max([note["bytes"], *(end for _, end in patch.values())])
        if end > len(self._memory):
            held = os.fstat(self._handle).st_size
            if held < end:
                raise WeightSyncError(f"the shared memory holds {held} bytes; {end} were sent")
            self._memory = _mapped(self._handle, end)
        for name, (word, shape, begin) in note["tensors"].items():
            dtype = getattr(torch, word)
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            weight = self._memory[begin : begin + num_bytes].view(dtype).reshape(shape)
            if name in patch:
                apply_changes(weight, self._memory[slice(*patch[name])], name)
            yield name, weight


def pieces(note: Note, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Where lies what must travel to memory elsewhere before `MappedWeights` can take these weights there.

    Args:
        note: of `SharedWeights.write`, with `patch` where that memory holds the last version.
        most_bytes: of one piece.

    Yields:
        begin and end, for the same place there.
    """
    begins = [begin for _, _, begin in note["tensors"].values()]
    whole = zip(note["tensors"], begins, [*begins[1:], note["bytes"]], strict=True)
    joined: list[list[int]] = []
    for begin, end in sorted(note["patch"].get(name, [begin, end]) for name, begin, end in whole):
        if joined and begin - joined[-1][1] < ALIGNMENT:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    for first, last in joined:
        for begin in range(first, last, most_bytes):
            yield begin, min(begin + most_bytes, last)


def _give_size(handle: int, num_bytes: int) -> None:
    """Give memory its size, and take the room: a mapped page for which there is none kills the process.

    Raises:
        WeightSyncError: there is no room.
    """
    os.ftruncate(handle, num_bytes)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        raise WeightSyncError(
            f"no room for {num_bytes} bytes in memory that processes share: {error.strerror}"
        ) from error


def _mapped(handle: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, num_bytes), dtype=torch.uint8)
