"""Prefix cache of the KV blocks: a chain of hashes over full blocks.

    digest_0 = H(version),  digest_{i+1} = H(digest_i, tokens of block i)

so a digest identifies every token up to the end of its block, and the policy version that computed the keys
and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from millrace.inference.block_manager import BlockManager

DIGEST_BYTES = 16


def root(version: int) -> bytes:
    """Return the digest that precedes the first block, for one policy version."""
    return blake2b(str(version).encode(), digest_size=DIGEST_BYTES).digest()


def _chained(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def chain(version: int, token_ids: np.ndarray, block_size: int) -> tuple[bytes, ...]:
    """Return the digest of each full block of int32 tokens."""
    digests = [root(version)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digests.append(_chained(digests[-1], token_ids[start : start + block_size].tobytes()))
    return tuple(digests[1:])


class PrefixCache:
    """Finds full blocks by their own tokens and all tokens before them.

    A block stays cached while it has references. After that it stays until it is evicted. Of the tokens of
    started requests, `num_queries` were looked up, and `num_hits` found and not computed.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self._blocks = blocks
        self._found: dict[bytes, tuple[int, bytes]] = {}
        self._digests: dict[int, bytes] = {}
        blocks.report_evictions(self._evicted)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def match(self, tokens: Sequence[int] | np.ndarray, version: int) -> list[int]:
        """Return the longest cached prefix of `tokens` as block ids, each retained for the caller.

        At least one token is never matched: a request must compute its last token to get logits.
        """
        size = self._blocks.block_size
        if len(tokens) <= size:
            return []
        array = np.asarray(tokens, dtype=np.int32)
        data, width = array.tobytes(), size * array.itemsize
        digest = root(version)
        found: list[int] = []
        for start in range(0, len(data) - width, width):
            piece = data[start : start + width]
            digest = _chained(digest, piece)
            block, held = self._found.get(digest, (-1, b""))
            # The tokens are compared too: a hash collision must not share keys between different prefixes.
            if held != piece:
                break
            found.append(block)
        self._blocks.retain(found)
        return found

    def digest(self, block: int) -> bytes:
        """Return the digest of a cached block, which is the parent of the next block, or raise KeyError."""
        return self._digests[block]

    def register(self, block: int, parent: bytes, tokens: np.ndarray) -> bytes:
        """Add a block that is in use, full, and will not be written again; return its digest.

        `parent` is the digest of the block before it, or `root(version)`; tokens are int32. If an equal
        prefix is cached already, that entry stays and this block is not added.

        Raises:
            ValueError: the number of tokens is not the size of a block, or the block is free or already
                cached for other tokens.
        """
        if len(tokens) != self._blocks.block_size:
            raise ValueError(
                f"a block of {self._blocks.block_size} tokens cannot be registered with {len(tokens)}; "
                "only full blocks are cached"
            )
        data = tokens.tobytes()
        digest = _chained(parent, data)
        if digest not in self._found:
            if block in self._digests:
                raise ValueError(f"block {block} is cached for other tokens; a full block is never written")
            self._blocks.keep(block)
            self._found[digest] = block, data
            self._digests[block] = digest
        return digest

    def drop_all(self) -> None:
        """Remove every entry; blocks in use keep their references."""
        for block in self._digests:
            self._blocks.forget(block)
        self._found.clear()
        self._digests.clear()

    def _evicted(self, block: int) -> None:
        del self._found[self._digests.pop(block)]
