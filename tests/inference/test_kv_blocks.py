"""What a transfer is checked for, its leases and its alarm, without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.inference.block_manager import BlockManager
from millrace.inference.kv_blocks import (
    WINDOW,
    KvBlock,
    KvImport,
    KvLayout,
    KvLeases,
    KvPrefix,
    LeaseEnded,
    TransferCounter,
    accepts_version,
    block_fault,
    checksum,
)
from millrace.inference.prefix_cache import chain

LAYOUT = KvLayout(
    model_type="llama",
    pools=((2, 8, 8),),
    block_size=4,
    dtype="float32",
    keys_transposed=True,
    deterministic=False,
    experts=None,
    block_bytes=16,
)
TOKENS = np.arange(12, dtype=np.int32)
PREFIX = KvPrefix(3, TOKENS, LAYOUT, chain(3, TOKENS, 4))
OTHER_FIELDS: dict[str, Any] = {
    "model_type": "qwen3",
    "pools": ((2, 8, 8), (2, 8, 8)),
    "block_size": 3,
    "dtype": "bfloat16",
    "keys_transposed": False,
    "deterministic": True,
    "experts": (2, 2),
    "block_bytes": 15,
}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_a_layout_that_differs_is_refused_by_name(field: str) -> None:
    own, value = replace(LAYOUT, **{field: OTHER_FIELDS[field]}), getattr(LAYOUT, field)
    assert PREFIX.refusal(own, 3) == f"layout: its {field} is {value}, the engine's {OTHER_FIELDS[field]}"


def test_another_version_and_foreign_digests_are_refused_by_name() -> None:
    assert PREFIX.refusal(LAYOUT, 3) == ""
    for own in (2, 4):
        assert not accepts_version(3, own)
        assert PREFIX.refusal(LAYOUT, own) == f"version: its policy version is 3, the engine's {own}"
    other = TOKENS.copy()
    other[11] += 1
    for wrong in (replace(PREFIX, token_ids=other), replace(PREFIX, version=4)):
        assert wrong.refusal(LAYOUT, wrong.version).startswith("digest: its digests are not those of")


def test_a_description_that_contradicts_itself_is_refused() -> None:
    assert (PREFIX.num_blocks, PREFIX.first, PREFIX.tokens(1).tolist()) == (3, 0, [4, 5, 6, 7])
    with pytest.raises(ValueError, match="a prefix of 3 blocks of 4 tokens was given with 11 tokens"):
        replace(PREFIX, token_ids=TOKENS[:11])
    assert replace(PREFIX, first=2).first == 2
    for first in (-1, 3):
        with pytest.raises(ValueError, match=f"first is {first}; a prefix of 3 blocks must send"):
            replace(PREFIX, first=first)


def test_a_block_must_follow_and_have_its_bytes() -> None:
    data, copy = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    block = KvBlock(1, data, checksum(PREFIX.digests[1], data))
    assert block_fault(PREFIX, block, copy, expected=1) == "" and np.array_equal(copy, data)
    for expected in (0, 2):
        fault = block_fault(PREFIX, block, copy, expected=expected)
        assert fault == f"order: block 1 arrived where block {expected} must follow"
    fault = block_fault(PREFIX, block, copy[:15], expected=1)
    assert fault == "size: block 1 has 16 bytes; the engine's have 15"
    flipped = data.copy()
    flipped[7] ^= 1
    moved = KvBlock(1, data, checksum(PREFIX.digests[0], data))
    for wrong in (replace(block, data=flipped), moved):
        fault = block_fault(PREFIX, wrong, copy, expected=1)
        assert fault == "checksum: the bytes of block 1 are not those that were exported"


def test_the_alarm_begins_once_and_ends_when_blocks_arrive_again() -> None:
    counter = TransferCounter()
    assert counter.add(KvImport(0, 0, 0)) == "" and counter.fraction == 1.0
    assert counter.add(KvImport(10, 10, 0)) == ""
    warning = counter.add(KvImport(10, 5, 5, "checksum: bad"))
    assert warning.startswith("the last 2 KV transfers brought 75.0% of the expected blocks; ")
    assert warning.endswith("The last one: checksum: bad")
    assert counter.add(KvImport(10, 0, 10, "version: old")) == ""
    for _ in range(WINDOW):
        assert counter.add(KvImport(2, 2, 0)) == ""
    assert (counter.num_imported, counter.num_refused, counter.fraction) == (15 + 2 * WINDOW, 15, 1.0)
    # 99 of 100 are enough, 98 are not.
    assert counter.add(KvImport(1274, 1260, 0)) == "" and counter.fraction == 0.99
    assert counter.add(KvImport(1, 0, 1, "order: no")) != ""


@pytest.fixture
def pool() -> BlockManager:
    return BlockManager(10, 4)


def test_a_lease_holds_its_blocks_to_its_deadline_or_release(pool: BlockManager) -> None:
    now_s = [100.0]
    leases = KvLeases(pool, lambda: now_s[0])
    first, second, third = (leases.open(pool.allocate(2) or [], lease_s) for lease_s in (5.0, 9.0, 9.0))
    assert (len(leases), leases.num_blocks, pool.num_free) == (3, 6, 4)
    leases.end(third)
    leases.end(third)
    assert (len(leases), leases.num_blocks, leases.pinned(), pool.num_free) == (2, 4, [1, 0, 3, 2], 6)
    now_s[0] = 104.9
    assert len(leases.blocks(first)) == 2
    leases.renew(first, 5.0)
    now_s[0] = 109.0
    leases.end_due()
    assert (len(leases), pool.num_free) == (1, 8)
    with pytest.raises(LeaseEnded, match="export the prefix again"):
        leases.blocks(second)
    now_s[0] = 109.9
    with pytest.raises(LeaseEnded):
        leases.renew(first, 5.0)
    assert (len(leases), leases.num_blocks, pool.num_free) == (0, 0, 10)


def test_leases_pin_half_of_the_pool_and_end_oldest_first(pool: BlockManager) -> None:
    leases = KvLeases(pool, lambda: 0.0)
    assert leases.room == 5 and not leases.end_oldest()
    first, second = (leases.open(pool.allocate(num) or [], 1.0) for num in (3, 2))
    assert leases.room == 0
    assert leases.end_oldest() and leases.room == 3
    with pytest.raises(LeaseEnded):
        leases.blocks(first)
    assert len(leases.blocks(second)) == 2
    leases.open(pool.allocate(3) or [], 1.0)
    leases.end_all()
    assert (len(leases), leases.room, pool.num_free) == (0, 5, 10)
