"""Allocation of the KV pool's blocks: reference counts, free blocks, and free blocks with cached content.

A block is used (it has references), empty (its content is not needed), or kept: free, but its content is a
cached prefix. Empty blocks are allocated first, then kept ones in order of release (LRU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def check_positive(**numbers: int) -> None:
    """Raise a ValueError that names a number below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


class BlockManager:
    """Blocks 0 to num_blocks - 1 of `block_size` tokens each, at first all empty.

    A number below 1 is a ValueError.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        check_positive(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks))[::-1]
        # Dictionaries keep their order, which is the order of eviction.
        self._kept: dict[int, None] = {}
        self._wanted: set[int] = set()

    def report_evictions(self, report: Callable[[int], None]) -> None:
        """Call `report` with each block that is evicted to make room."""
        self._on_evict = report

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, kept ones included."""
        return len(self._empty) + len(self._kept)

    def num_references(self, block: int) -> int:
        """Return the reference count of a block; 0 if it is free."""
        return self._references[block]

    def allocate(self, num: int) -> list[int] | None:
        """Allocate `num` blocks with one reference each; None, and no change, if fewer are free."""
        if num > self.num_free:
            return None
        while len(self._empty) < num:
            block = next(iter(self._kept))
            self.forget(block)
            if self._on_evict is not None:
                self._on_evict(block)
        first = len(self._empty) - num
        taken = self._empty[first:]
        del self._empty[first:]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these blocks, used or kept; ValueError if one is empty."""
        for block in blocks:
            if not self._references[block]:
                if block not in self._kept:
                    raise ValueError(f"block {block} is empty and cannot be shared; allocate one")
                del self._kept[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each of these blocks, given in the order of their tokens.

        Later blocks are freed first, so the tail of a cached chain is evicted first. A block without
        references is a ValueError.
        """
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is free; it was released more often than it was retained")
            self._references[block] = left
            if not left:
                if block in self._wanted:
                    self._kept[block] = None
                else:
                    self._empty.append(block)

    def keep(self, block: int) -> None:
        """Mark a used block so that its content is kept after its last release; ValueError if it is free."""
        if not self._references[block]:
            raise ValueError(f"block {block} is free; only a block in use can be kept")
        self._wanted.add(block)

    def forget(self, block: int) -> None:
        """Remove the mark of `keep`: the content of this block is not needed any more."""
        self._wanted.discard(block)
        if block in self._kept:
            del self._kept[block]
            self._empty.append(block)
