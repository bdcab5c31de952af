"""Export and import of prefixes by an engine: the two ends of a KV transfer.

Between two steps of the engine, like every other operation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from types import TracebackType

import numpy as np

from millrace.inference.kv_blocks import (
    KvBlock,
    KvImport,
    KvLeases,
    KvPrefix,
    LeaseEnded,
    TransferCounter,
    block_fault,
    checksum,
)
from millrace.inference.prefix_cache import root
from millrace.inference.runner import Runner
from millrace.inference.scheduler import Scheduler

# Copied at once; few enough that the copies need little memory.
BATCH_BLOCKS = 16
# Reasons for blocks that were not offered, so none was refused.
NOT_ARRIVED = ("missing", "lease", "error")


class KvLease:
    """An exported prefix whose blocks stay in the pool until `release`, or until the lease ends by itself.

    As a context manager it is released at the end.
    """

    def __init__(self, prefix: KvPrefix, number: int, leases: KvLeases, runner: Runner) -> None:
        self.prefix = prefix
        self._number, self._leases, self._runner = number, leases, runner

    def __enter__(self) -> KvLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def blocks(self, into_MD: np.ndarray | None = None) -> Iterator[KvBlock]:
        """Copy the blocks from `prefix.first` on, in order; LeaseEnded if the lease ends meanwhile.

        The bytes go `into_MD`, uint8 [blocks, block_bytes], where it is given.
        """
        first, size = self.prefix.first, self.prefix.layout.block_bytes
        for begin in range(first, self.prefix.num_blocks, BATCH_BLOCKS):
            pinned = self._leases.blocks(self._number)[begin : begin + BATCH_BLOCKS]
            if into_MD is None:
                data_MD = np.empty((len(pinned), size), np.uint8)
            else:
                data_MD = into_MD[begin - first : begin - first + len(pinned)]
            self._runner.read_blocks(np.array(pinned, np.int64), data_MD)
            for index, data_D in enumerate(data_MD, begin):
                yield KvBlock(index, data_D, checksum(self.prefix.digests[index], data_D))

    def renew(self, lease_s: float) -> None:
        """Move the deadline to `lease_s` seconds from now; LeaseEnded if the lease has ended."""
        self._leases.renew(self._number, lease_s)

    def release(self) -> None:
        """Unpin the blocks; a lease that has ended is not changed."""
        self._leases.end(self._number)


class KvTransfer:
    """The transfers of one engine; `leases` are open ones of its exports, `counter` counts its imports."""

    def __init__(self, runner: Runner, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.leases = KvLeases(scheduler.blocks, clock)
        self.counter = TransferCounter()
        self._runner, self._scheduler = runner, scheduler

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Return the number of blocks at the beginning of these tokens that the prefix cache holds."""
        found = self._scheduler.cache.match(token_ids, self._scheduler.allocator.version)
        self._scheduler.blocks.release(found)
        return len(found)

    def export_prefix(self, token_ids: Sequence[int], *, skip: int, lease_s: float) -> KvLease | None:
        """Pin the cached blocks of these tokens; see `PagedEngine.export_prefix`."""
        if skip < 0 or lease_s <= 0:
            raise ValueError(f"skip is {skip} and lease_s {lease_s:g}; they must be at least 0 and above 0")
        self.leases.end_due()
        scheduler, version = self._scheduler, self._scheduler.allocator.version
        found = scheduler.cache.match(token_ids, version)
        pinned, rest = found[: self.leases.room], found[self.leases.room :]
        scheduler.blocks.release(rest)
        if len(pinned) <= skip:
            scheduler.blocks.release(pinned)
            return None
        prefix = KvPrefix(
            version=version,
            token_ids=np.array(token_ids[: len(pinned) * scheduler.blocks.block_size], np.int32),
            layout=self._runner.layout,
            digests=tuple(scheduler.cache.digest(block) for block in pinned),
            first=skip,
        )
        return KvLease(prefix, self.leases.open(pinned, lease_s), self.leases, self._runner)

    def import_prefix(self, prefix: KvPrefix, blocks: Iterable[KvBlock]) -> KvImport:
        """Add the blocks that are verified to the prefix cache; see `PagedEngine.import_prefix`."""
        why = "" if self._scheduler.allocator.prefix_caching else "off: the engine has no prefix cache"
        why = why or prefix.refusal(self._runner.layout, self._scheduler.allocator.version)
        if why:
            num_offered = prefix.num_blocks - prefix.first
            return self._count(KvImport(num_offered, 0, num_offered, why))
        # One token more, since the last token is never matched.
        wanted = np.append(prefix.token_ids, np.int32(0))
        held = self._scheduler.cache.match(wanted, prefix.version)
        num_here = len(held)
        num_expected, why = prefix.num_blocks - max(num_here, prefix.first), "error: while blocks arrived"
        try:
            why = self._take(prefix, blocks, held)
        finally:
            # Until here no block of the chain could be evicted for another.
            self._scheduler.blocks.release(held)
            num_imported = len(held) - num_here
            num_lost = num_expected - num_imported
            if num_lost and not why:
                why = f"missing: {num_lost} of {num_expected} blocks did not arrive"
            num_refused = 0 if why.startswith(NOT_ARRIVED) else num_lost
            done = self._count(KvImport(num_expected, num_imported, num_refused, why))
        return done

    def _take(self, prefix: KvPrefix, blocks: Iterable[KvBlock], held: list[int]) -> str:
        """Import blocks behind those that are `held`, and append them to it; return why it ended early."""
        arriving = (block for block in blocks if block.index >= len(held))
        staged_MD = np.empty((BATCH_BLOCKS, prefix.layout.block_bytes), np.uint8)
        while len(held) < prefix.num_blocks:
            num_good, why = 0, ""
            try:
                for block in islice(arriving, min(BATCH_BLOCKS, prefix.num_blocks - len(held))):
                    # Verified is the copy that is stored.
                    if why := block_fault(prefix, block, staged_MD[num_good], expected=len(held) + num_good):
                        break
                    num_good += 1
            except LeaseEnded as error:
                why = f"lease: {error}"
            # One free block stays reserved for each running request, as when requests start.
            room = max(0, self._scheduler.blocks.num_free - self._scheduler.num_running)
            if num_good > room:
                num_good, why = room, f"room: only {room} blocks of the pool are free"
            self._store(prefix, staged_MD[:num_good], held)
            if why or not num_good:
                return why
        return ""

    def _store(self, prefix: KvPrefix, data_MD: np.ndarray, held: list[int]) -> None:
        if not len(data_MD):
            return
        fresh = self._scheduler.blocks.allocate(len(data_MD))
        assert fresh is not None
        self._runner.write_blocks(np.array(fresh, np.int64), data_MD)
        for index, block in enumerate(fresh, len(held)):
            parent = prefix.digests[index - 1] if index else root(prefix.version)
            self._scheduler.cache.register(block, parent, prefix.tokens(index))
        held += fresh

    def _count(self, done: KvImport) -> KvImport:
        if warning := self.counter.add(done):
            warnings.warn(warning, stacklevel=4)
        return done
