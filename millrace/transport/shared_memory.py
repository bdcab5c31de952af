"""Weight updates through anonymous shared memory (memfd) between processes of one machine.

The trainer overwrites the previous version, and every sampler maps the same pages. The kernel frees the
memory when the last process that maps it ends, however it ends. The size of `/dev/shm`, in a container often
64 MB, does not limit it. Linux only.
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
from millrace.transport.sync import Note, WeightUpdate

# Length of a cache line, and a multiple of every element size.
ALIGNMENT = 64


class SharedWeights:
    """The trainer's end of the shared memory; `delta` writes the changes since the previous version too.

    Attributes:
        handle: descriptor of the memory, which a sampler process inherits.
        metrics: empty unless a delta was written. `weight_sync/payload_bytes`: bytes to transfer to a remote
            sampler that holds the previous version. `weight_sync/payload_fraction`: their fraction of the
            bytes of all weights.
    """

    def __init__(self, *, delta: bool = False) -> None:
        self.handle = os.memfd_create("millrace-weights")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._delta = delta
        self.metrics: dict[str, float] = {}
        # Manifest of the weights in the memory; None while they are incomplete.
        self._last: Note | None = None

    def write(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        canary: Callable[[], Canary] | None = None,
    ) -> Note:
        """Overwrite the previous version, which no sampler may be reading.

        The weights are copied before this returns, and `canary` is called after they are copied.

        Returns:
            the manifest for `MappedWeights`: dtype, shape and offset of each weight, its fingerprint, and the
            canary. `changes` is None, or holds the previous version (`base`) and the byte range of each
            weight's delta (`packed`); a weight without an entry there is transferred completely.

        Raises:
            WeightSyncError: memory is exhausted, or a name occurs twice.
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
                # The memory still holds the previous version here.
                packed = changed.find(name, places[name], self._memory[begin:end], there)
                if packed is not None:
                    self._reserve(changed.end)
                    self._memory[changed.end - len(packed) : changed.end] = packed
            digests[name] = digest(there, self._memory[begin:end])
        asked = None if canary is None else canary().note()
        told, self.metrics = None, {}
        # A delta needs the same names, dtypes, shapes and offsets as the previous version.
        if changed is not None and places == changed.last["tensors"]:
            told = {"base": changed.last["version"], "packed": changed.packed}
            fraction = changed.num_bytes / max(end, 1)
            self.metrics = {
                "weight_sync/payload_bytes": changed.num_bytes,
                "weight_sync/payload_fraction": fraction,
            }
        proof = {"fingerprint": digests, "canary": asked}
        self._last = {"version": version, "bytes": end, "tensors": places, "changes": told, **proof}
        return self._last

    def close(self) -> None:
        """Release the memory; the pages stay for a sampler that still maps them."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.handle)

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self._memory):
            _give_size(self.handle, num_bytes)
            self._memory = _mapped(self.handle, num_bytes)


class _Changes:
    """Deltas against the version in the memory, weight by weight.

    `packed` has the byte range of each delta that is smaller than its weight. `num_bytes` counts the bytes to
    transfer, of weights and deltas. `end` is the end of the last delta in the memory.
    """

    def __init__(self, last: Note) -> None:
        self.last = last
        self.packed: dict[str, list[int]] = {}
        # Deltas follow the weights; they are valid while all offsets equal those of the previous version.
        self.num_bytes, self.end = 0, int(last["bytes"])

    def find(self, name: str, place: tuple[str, list[int], int], held: Tensor, new: Tensor) -> Tensor | None:
        """Return the delta to write up to the new `end`, uint8 [num_bytes]; None to send the whole weight."""
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
    """A sampler's end of the shared memory: the transport of a `sync.WeightReceiver`.

    Attributes:
        note: manifest of the version to take.
    """

    def __init__(self, handle: int, answer: Callable[[Note], None]) -> None:
        self.note: Note = {}
        self._handle, self._answer = handle, answer
        self._memory = torch.empty(0, dtype=torch.uint8)

    def expect(self, note: Note) -> None:
        """Set the version that `take` returns.

        Args:
            note: manifest from `SharedWeights.write`. If the memory is a remote copy that received deltas,
                its `patch` maps weights to their byte ranges.
        """
        self.note = note

    def take(self) -> WeightUpdate:
        """Return the weight update that `note` describes; see `sync.Incoming`."""
        note = self.note
        # A retry reads the same memory again.
        proof = {name: note[name] for name in ("fingerprint", "canary")}
        return WeightUpdate(note["version"], self._read(note), proof)

    def answer(self, note: Note) -> None:
        """Report the result to the trainer; see `sync.Incoming`."""
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
    """Yield begin and end of the byte ranges to copy to a remote memory before its `MappedWeights.take`.

    The note is the manifest from `SharedWeights.write`, with `patch` if the previous version is there. The
    offsets are the same in both memories.
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
    """Resize the memory and allocate its pages now: a later page fault without memory kills the process."""
    os.ftruncate(handle, num_bytes)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        raise WeightSyncError(
            f"no room for {num_bytes} bytes in memory that processes share: {error.strerror}"
        ) from error


def _mapped(handle: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, num_bytes), dtype=torch.uint8)
