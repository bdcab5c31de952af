"""KV transfer through anonymous shared memory (memfd) between processes of one machine.

The exporting process copies blocks into the memory, over those of the transfer before, and every importing
process maps the same pages. The kernel frees them when the last of these processes ends, however it ends.
Linux only. M = blocks that are sent, D = bytes of a block.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict

import numpy as np

from millrace.inference.kv_blocks import KvBlock, KvLayout, KvPrefix
from millrace.inference.kv_transfer import KvLease


class BlockMemoryError(RuntimeError):
    """Blocks cannot be written to the shared memory or read from it; the message names the reason."""


class KvManifest(TypedDict):
    """What the memory holds, for the processes that map it; JSON-compatible.

    Attributes:
        version, token_ids, layout, digests, first: as of `KvPrefix`; digests are hexadecimal.
        checksums: of each block in the memory, hexadecimal, from block `first` on.
        sender: host, port and key of the `KvNetwork` that offers the bytes, if they are on another machine.
    """

    version: int
    token_ids: list[int]
    layout: dict[str, Any]
    digests: list[str]
    first: int
    checksums: list[str]
    sender: NotRequired[Sequence[str | int]]


class SharedBlocks:
    """The exporting end; `handle` is the descriptor of the memory, to be inherited or sent over a socket.

    Without a `handle` it makes the memory; else it takes over the descriptor of another process's memory.
    """

    def __init__(self, handle: int | None = None) -> None:
        self.handle = os.memfd_create("millrace-kv") if handle is None else handle
        self._memory_X = np.empty(0, np.uint8)

    def write(self, lease: KvLease) -> KvManifest:
        """Copy the blocks of a lease, over those of the transfer before, and return the manifest.

        A process that still reads the blocks before finds other bytes, and refuses them by their checksum.

        Raises:
            BlockMemoryError: memory is exhausted.
            LeaseEnded: the lease has ended.
        """
        prefix, size = lease.prefix, lease.prefix.layout.block_bytes
        data_MD = self.memory((prefix.num_blocks - prefix.first) * size).reshape(-1, size)
        return {
            "version": prefix.version,
            "token_ids": prefix.token_ids.tolist(),
            "layout": asdict(prefix.layout),
            "digests": [digest.hex() for digest in prefix.digests],
            "first": prefix.first,
            "checksums": [block.checksum.hex() for block in lease.blocks(data_MD)],
        }

    def memory(self, num_bytes: int) -> np.ndarray:
        """Return the first bytes of the memory, uint8 [num_bytes]; BlockMemoryError if there is no room."""
        if num_bytes > len(self._memory_X):
            self._grow(num_bytes)
        return self._memory_X[:num_bytes]

    def close(self) -> None:
        """Release the memory; the pages stay for a process that still maps them."""
        self._memory_X = np.empty(0, np.uint8)
        os.close(self.handle)

    def _grow(self, num_bytes: int) -> None:
        # Never smaller: a page that a reader maps and the memory has lost would kill the reader.
        os.ftruncate(self.handle, max(num_bytes, os.fstat(self.handle).st_size))
        try:
            # All pages now: a later page fault without memory kills the process.
            os.posix_fallocate(self.handle, 0, num_bytes)
        except OSError as error:
            raise BlockMemoryError(
                f"no room for {num_bytes} bytes of keys and values in memory that processes share: "
                f"{error.strerror}"
            ) from error
        self._memory_X = np.frombuffer(mmap.mmap(self.handle, num_bytes), np.uint8)


class MappedBlocks:
    """An importing end. It never writes, and closes the descriptor `handle` with `close`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._memory_X = np.empty(0, np.uint8)

    def read(self, manifest: KvManifest) -> tuple[KvPrefix, Iterator[KvBlock]]:
        """Return description and blocks for `PagedEngine.import_prefix`, which copies them.

        Raises:
            BlockMemoryError: the manifest is not one of `SharedBlocks.write`, or the memory is smaller.
        """
        try:
            prefix = KvPrefix(
                version=int(manifest["version"]),
                token_ids=np.array(manifest["token_ids"], np.int32),
                layout=_layout_of(manifest["layout"]),
                digests=tuple(map(bytes.fromhex, manifest["digests"])),
                first=int(manifest["first"]),
            )
            checksums = [bytes.fromhex(word) for word in manifest["checksums"]]
            needed = len(checksums) * prefix.layout.block_bytes
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise BlockMemoryError(f"the manifest of a KV transfer cannot be read: {error!r}") from error
        held = os.fstat(self._handle).st_size
        if not 0 < needed <= held:
            raise BlockMemoryError(f"the shared memory holds {held} bytes; {needed} were announced")
        if needed > len(self._memory_X):
            self._memory_X = np.frombuffer(mmap.mmap(self._handle, held, access=mmap.ACCESS_READ), np.uint8)
        data_MD = self._memory_X[:needed].reshape(len(checksums), -1)
        return prefix, (
            KvBlock(index, data_D, word)
            for index, (data_D, word) in enumerate(zip(data_MD, checksums, strict=True), prefix.first)
        )

    def close(self) -> None:
        """Release the memory and the descriptor."""
        self._memory_X = np.empty(0, np.uint8)
        os.close(self._handle)


def _layout_of(fields: dict[str, Any]) -> KvLayout:
    pools = tuple((int(heads), int(key), int(value)) for heads, key, value in fields["pools"])
    experts = None if fields["experts"] is None else (int(fields["experts"][0]), int(fields["experts"][1]))
    return KvLayout(**{**fields, "pools": pools, "experts": experts})
