"""KV transfer between two engines: description, checksums, leases, counters. No torch.

One engine exports the keys and values of a prefix, whole blocks of it; another imports them and computes only
the tokens after it. The importing engine takes a block only if policy version, layout, digest and checksum
are its own, and takes none behind one that it refused. So a failure makes the prefix shorter, never wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import count

import numpy as np
import xxhash

from millrace.inference.block_manager import BlockManager
from millrace.inference.prefix_cache import chain

# Of the blocks that an importing engine expected; below it, prompts are computed twice without notice.
MIN_IMPORTED = 0.99
# The alarm looks at so many of the last transfers, or a late failure would not show among early successes.
WINDOW = 64
# A lease may not take the blocks that running requests need.
MAX_LEASED = 0.5


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Model and form of a block's bytes; engines exchange blocks only if all of it is equal.

    `pools` has heads, key width and value width of each pool. `experts` is (layers with a router, experts of
    a token) where the experts of tokens are recorded. In `deterministic` mode keys and values have other
    bits.
    """

    model_type: str
    pools: tuple[tuple[int, int, int], ...]
    block_size: int
    dtype: str
    keys_transposed: bool
    deterministic: bool
    experts: tuple[int, int] | None
    block_bytes: int

    def difference(self, own: KvLayout) -> str:
        """Return the first field in which this differs from an engine's `own` layout; empty if none does."""
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(own, field.name)
            if theirs != ours:
                return f"its {field.name} is {theirs}, the engine's {ours}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class KvPrefix:
    """Description of an exported prefix, int32 tokens [blocks * block_size]; a digest for each block.

    Blocks before `first` are not sent, since the importing engine has them. A description that contradicts
    itself is a ValueError.
    """

    version: int
    token_ids: np.ndarray
    layout: KvLayout
    digests: tuple[bytes, ...]
    first: int = 0

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.digests) * self.layout.block_size:
            raise ValueError(
                f"a prefix of {len(self.digests)} blocks of {self.layout.block_size} tokens was given with "
                f"{len(self.token_ids)} tokens; only whole blocks are exported"
            )
        if not 0 <= self.first < len(self.digests):
            raise ValueError(
                f"first is {self.first}; a prefix of {len(self.digests)} blocks must send at least its last"
            )

    @property
    def num_blocks(self) -> int:
        """Number of blocks, those before `first` included."""
        return len(self.digests)

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of one block, int32 [block_size]."""
        size = self.layout.block_size
        return self.token_ids[index * size : (index + 1) * size]

    def refusal(self, layout: KvLayout, version: int) -> str:
        """Return why an engine takes no block of this prefix; empty if it may take them."""
        if difference := self.layout.difference(layout):
            return f"layout: {difference}"
        if not accepts_version(self.version, version):
            return f"version: its policy version is {self.version}, the engine's {version}"
        if self.digests != chain(self.version, self.token_ids, layout.block_size):
            return "digest: its digests are not those of its tokens and its policy version"
        return ""


def accepts_version(version: int, own: int) -> bool:
    """Whether keys and values of a policy version may be used by an engine with its `own`."""
    return version == own


@dataclass(frozen=True, slots=True, eq=False)
class KvBlock:
    """One exported block: its index in the prefix, its bytes (uint8), and their `checksum`.

    The bytes may be memory that another process writes to: copy them, then verify the copy.
    """

    index: int
    data: np.ndarray
    checksum: bytes


def checksum(digest: bytes, data: np.ndarray) -> bytes:
    """Compute XXH3-128 of a block's digest and bytes, which are contiguous.

    With the digest it holds for these tokens and these weights only. It detects accidents and resists no
    attack.
    """
    state = xxhash.xxh3_128(digest)
    state.update(data.data)
    return state.digest()


def block_fault(prefix: KvPrefix, block: KvBlock, copy: np.ndarray, *, expected: int) -> str:
    """Copy a block's bytes; return why it cannot follow the blocks before `expected`, empty if it can.

    `copy` is uint8 [bytes of a block of the engine].
    """
    if block.index != expected:
        return f"order: block {block.index} arrived where block {expected} must follow"
    if block.data.nbytes != copy.nbytes:
        return f"size: block {block.index} has {block.data.nbytes} bytes; the engine's have {copy.nbytes}"
    copy[:] = block.data
    if block.checksum != checksum(prefix.digests[block.index], copy):
        return f"checksum: the bytes of block {block.index} are not those that were exported"
    return ""


@dataclass(frozen=True, slots=True)
class KvImport:
    """What became of a transfer, in blocks.

    `num_expected` were missing in the importing engine's cache, `num_imported` of them are now there, and
    `num_refused` were offered in vain. `reason` begins with the kind of failure: `layout`, `version`,
    `digest`, `order`, `size`, `checksum`, `room`, `missing` (they did not arrive), `lease` (it ended) or
    `off` (no prefix cache).
    """

    num_expected: int
    num_imported: int
    num_refused: int
    reason: str = ""


class TransferCounter:
    """Counts imports, and raises an alarm where too few of the expected blocks were imported.

    `num_imported` and `num_refused` are blocks since the engine was built. `fraction` is imported over
    expected blocks of the last transfers; 1 if none was expected. Other threads may read them.
    """

    def __init__(self) -> None:
        self.num_imported = self.num_refused = 0
        self.fraction = 1.0
        self._recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def add(self, done: KvImport) -> str:
        """Count a transfer; return a warning if it begins an alarm, else an empty text.

        An alarm ends when the fraction is back at MIN_IMPORTED.
        """
        self.num_imported += done.num_imported
        self.num_refused += done.num_refused
        if not done.num_expected:
            return ""
        self._recent.append((done.num_expected, done.num_imported))
        expected, imported = (sum(column) for column in zip(*self._recent, strict=True))
        before, self.fraction = self.fraction, imported / expected
        if self.fraction >= MIN_IMPORTED or before < MIN_IMPORTED:
            return ""
        return (
            f"the last {len(self._recent)} KV transfers brought {self.fraction:.1%} of the expected blocks; "
            f"the rest of the prompts is computed again. The last one: {done.reason}"
        )


class LeaseEnded(RuntimeError):
    """The blocks of a lease are no longer pinned; what was not read is lost to this transfer."""


class KvLeases:
    """Open leases: blocks with a reference each until release or deadline. `clock` is in seconds.

    `num_blocks` are pinned, one that several leases pin as often; other threads may read it.
    """

    def __init__(self, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self._blocks = blocks
        self._clock = clock
        self.num_blocks = 0
        self._numbers = count()
        # Blocks and deadline of each lease, oldest first.
        self._open: dict[int, tuple[list[int], float]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def pinned(self) -> list[int]:
        """Return the blocks of all leases, `num_blocks` in all."""
        return [block for blocks, _ in self._open.values() for block in blocks]

    @property
    def room(self) -> int:
        """Number of blocks that further leases may pin: MAX_LEASED of the pool in all."""
        return max(0, int(MAX_LEASED * self._blocks.num_blocks) - self.num_blocks)

    def open(self, blocks: list[int], lease_s: float) -> int:
        """Open a lease of blocks that are retained for it; return its number."""
        number = next(self._numbers)
        self.num_blocks += len(blocks)
        self._open[number] = blocks, self._clock() + lease_s
        return number

    def blocks(self, number: int) -> list[int]:
        """Return the blocks of a lease; LeaseEnded if it was released, ended or is past its deadline."""
        self.end_due()
        if number not in self._open:
            raise LeaseEnded(
                "the lease has ended: it was released, its deadline passed, or the engine needed the blocks, "
                "got new weights or slept; export the prefix again"
            )
        return self._open[number][0]

    def renew(self, number: int, lease_s: float) -> None:
        """Move the deadline of a lease to `lease_s` from now; LeaseEnded as for `blocks`."""
        self._open[number] = self.blocks(number), self._clock() + lease_s

    def end(self, number: int) -> None:
        """End a lease; one that has ended is not changed."""
        if (lease := self._open.pop(number, None)) is not None:
            self.num_blocks -= len(lease[0])
            self._blocks.release(lease[0])

    def end_due(self) -> None:
        """End the leases past their deadline."""
        if self._open:
            now_s = self._clock()
            for number in [number for number, (_, until_s) in self._open.items() if until_s <= now_s]:
                self.end(number)

    def end_oldest(self) -> bool:
        """End the lease that was opened first; return whether there was one."""
        for number in self._open:
            self.end(number)
            return True
        return False

    def end_all(self) -> None:
        """End every lease."""
        while self.end_oldest():
            pass
