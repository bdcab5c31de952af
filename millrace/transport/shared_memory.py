"""Weight updates through anonymous shared memory (memfd) between processes of one machine.

The trainer overwrites the previous version, and every sampler maps the same pages. The kernel frees the
memory when the last process that maps it ends, however it ends. The size of `/dev/shm`, in a container often
64 MB, does not limit it. Linux only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.delta import apply_changes, changes
from millrace.transport.fingerprint import digest
from millrace.transport.weight_update import WeightSyncError, WeightUpdate

# Length of a cache line, and a multiple of every element size.
ALIGNMENT = 64
# The dtype, shape and offset of a weight in the memory.
Place = tuple[str, list[int], int]


class WeightChanges(TypedDict):
    """Deltas beside the weights in the memory: the previous version, and the byte range of each delta."""

    base: int
    packed: dict[str, list[int]]


class WeightManifest(TypedDict):
    """What the memory holds, for the processes that map it; JSON-compatible.

    Attributes:
        version: policy version of the weights.
        bytes: the end of the last weight.
        tensors: where each weight is.
        changes: deltas since the previous version, or None; a weight without an entry is transferred whole.
        fingerprint: the checksum of each weight.
        canary: `Canary.fields` of the trainer, or None.
        patch: in a remote copy of the memory: the byte range of each delta to apply to the previous version.
    """

    version: int
    bytes: int
    tensors: dict[str, Place]
    changes: WeightChanges | None
    fingerprint: dict[str, str]
    canary: dict[str, Any] | None
    patch: NotRequired[dict[str, list[int]]]


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
        # Of the weights in the memory; None while they are incomplete.
        self._last: WeightManifest | None = None

    def write(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        policy_version: int,
        canary: Callable[[], Canary] | None = None,
    ) -> WeightManifest:
        """Overwrite the previous version, which no engine may be reading, and return the manifest.

        The weights are copied before this returns, and `canary` is called after they are copied.

        Raises:
            WeightSyncError: memory is exhausted, or a name occurs twice.
        """
        places: dict[str, Place] = {}
        digests: dict[str, str] = {}
        changed = None if self._last is None or not self._delta else _Changes(self._last)
        self._last, end = None, 0
        for name, tensor in tensors:
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
        canary_fields = None if canary is None else canary().fields()
        deltas: WeightChanges | None = None
        self.metrics = {}
        # A delta needs the same names, dtypes, shapes and offsets as the previous version.
        if changed is not None and places == changed.last["tensors"]:
            deltas = {"base": changed.last["version"], "packed": changed.packed}
            fraction = changed.num_bytes / max(end, 1)
            self.metrics = {
                "weight_sync/payload_bytes": changed.num_bytes,
                "weight_sync/payload_fraction": fraction,
            }
        self._last = {
            "version": policy_version,
            "bytes": end,
            "tensors": places,
            "changes": deltas,
            "fingerprint": digests,
            "canary": canary_fields,
        }
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

    def __init__(self, last: WeightManifest) -> None:
        self.last = last
        self.packed: dict[str, list[int]] = {}
        # Deltas follow the weights; they are valid while all offsets equal those of the previous version.
        self.num_bytes, self.end = 0, int(last["bytes"])

    def find(self, name: str, place: Place, held: Tensor, new: Tensor) -> Tensor | None:
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
    """An engine's end of the shared memory, the transport of a `WeightReceiver`.

    Attributes:
        manifest: from `SharedWeights.write`, of the version to take; see `expect`.
    """

    manifest: WeightManifest

    def __init__(self, handle: int, answer: Callable[[str, float], None]) -> None:
        self._handle, self.answer = handle, answer
        self._memory = torch.empty(0, dtype=torch.uint8)

    def expect(self, manifest: WeightManifest) -> None:
        """Set the version that `take` returns.

        Args:
            manifest: from `SharedWeights.write`. If the memory is a remote copy that received deltas, its
                `patch` maps weights to their byte ranges.
        """
        self.manifest = manifest

    def take(self) -> WeightUpdate:
        """Return the weight update that `manifest` describes; a retry reads the same memory again."""
        manifest, fields = self.manifest, self.manifest["canary"]
        canary = None if fields is None else Canary.of(fields)
        return WeightUpdate(manifest["version"], self._read(manifest), manifest["fingerprint"], canary)

    def _read(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        patch = manifest.get("patch", {})
        end = max([manifest["bytes"], *(end for _, end in patch.values())])
        if end > len(self._memory):
            held = os.fstat(self._handle).st_size
            if held < end:
                raise WeightSyncError(f"the shared memory holds {held} bytes; {end} were sent")
            self._memory = _mapped(self._handle, end)
        for name, (word, shape, begin) in manifest["tensors"].items():
            dtype = getattr(torch, word)
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            weight = self._memory[begin : begin + num_bytes].view(dtype).reshape(shape)
            if name in patch:
                apply_changes(weight, self._memory[slice(*patch[name])], name)
            yield name, weight


def pieces(manifest: WeightManifest, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the byte ranges to copy to a remote memory before its `MappedWeights.take`.

    `manifest` has a `patch`, empty unless the previous version is there. The offsets are the same in both
    memories.
    """
    patch, begins = manifest.get("patch", {}), [begin for _, _, begin in manifest["tensors"].values()]
    whole = zip(manifest["tensors"], begins, [*begins[1:], manifest["bytes"]], strict=True)
    joined: list[list[int]] = []
    for begin, end in sorted(patch.get(name, [begin, end]) for name, begin, end in whole):
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
