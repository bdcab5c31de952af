"""Blocks through shared memory: what two processes see, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import socket
from typing import Any, cast

import numpy as np
import pytest

from millrace.inference.engine import PagedEngine
from millrace.inference.kv_blocks import LeaseEnded
from millrace.inference.shared_blocks import BlockMemoryError, KvManifest, MappedBlocks, SharedBlocks
from millrace.models.load import Model
from millrace.types import SamplingParams
from tests import forked
from tests.inference.fresh import paged, same
from tests.inference.invariants import check_engine
from tests.inference.test_kv_transfer import ONE, PROMPT, SOME, taken
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny_model("llama")


@pytest.fixture
def shared() -> Any:
    memory = SharedBlocks()
    yield memory
    memory.close()


@pytest.fixture
def mapped(shared: SharedBlocks) -> Any:
    memory = MappedBlocks(os.dup(shared.handle))
    yield memory
    memory.close()


def written(
    engine: PagedEngine, shared: SharedBlocks, prompt: tuple[int, ...] = PROMPT, skip: int = 0
) -> Any:
    """The manifest of a prompt that the engine has computed, as another process would read it."""
    engine.generate([prompt], [ONE])
    lease = engine.export_prefix(prompt, skip=skip)
    assert lease is not None
    with lease:
        manifest = shared.write(lease)
    check_engine(engine)
    return json.loads(json.dumps(manifest))


@pytest.mark.slow
def test_blocks_pass_through_the_memory(llama: Model, shared: SharedBlocks, mapped: MappedBlocks) -> None:
    sender, engine = paged(llama, max_cache_tokens=2048), paged(llama)
    long = tuple(np.random.default_rng(0).integers(1, 40, 90).tolist())
    # The memory grows, and a shorter prefix leaves the rest of it as it was.
    for prompt, num_blocks in ((PROMPT, 7), (long, 22), (PROMPT[::-1], 7)):
        assert taken(engine, *mapped.read(written(sender, shared, prompt))) == (num_blocks, 0, "")
        assert same(engine.generate([prompt], [SOME]), paged(llama).generate([prompt], [SOME]))
    manifest = written(sender, shared, PROMPT, skip=5)
    assert (manifest["first"], len(manifest["checksums"])) == (5, 2)
    assert taken(engine, *mapped.read(manifest))[1:] == (0, "")


def test_blocks_that_are_written_over_while_they_are_read_are_refused(
    llama: Model, shared: SharedBlocks, mapped: MappedBlocks
) -> None:
    sender, engine = paged(llama), paged(llama)
    prefix, blocks = mapped.read(written(sender, shared))
    written(sender, shared, PROMPT[::-1])
    reason = "checksum: the bytes of block 0 are not those that were exported"
    assert taken(engine, prefix, blocks, alarm=True) == (0, 7, reason)


def test_manifests_that_do_not_fit_are_refused(
    llama: Model, shared: SharedBlocks, mapped: MappedBlocks
) -> None:
    manifest = written(paged(llama), shared)
    size = manifest["layout"]["block_bytes"]
    broken: list[tuple[dict[str, Any], str]] = [
        ({"layout": {**manifest["layout"], "block_bytes": 2 * size}}, "holds .* bytes; .* were announced"),
        ({"layout": {**manifest["layout"], "block_bytes": 0}}, "0 were announced"),
        ({"layout": {}}, "cannot be read: KeyError"),
        ({"token_ids": [1 << 40]}, "cannot be read: OverflowError"),
        ({"digests": ["xyz"]}, "cannot be read: ValueError"),
        ({"first": 7}, "must send at least its last"),
        ({"checksums": None}, "cannot be read: TypeError"),
    ]
    for change, message in broken:
        with pytest.raises(BlockMemoryError, match=message):
            mapped.read({**manifest, **change})
    with pytest.raises(BlockMemoryError, match="cannot be read: KeyError"):
        mapped.read(cast(KvManifest, {}))
    # Fewer blocks than were announced are a shorter prefix.
    prefix, blocks = mapped.read({**manifest, "checksums": manifest["checksums"][:2]})
    missing = "missing: 5 of 7 blocks did not arrive"
    assert taken(paged(llama), prefix, blocks, alarm=True) == (2, 0, missing)


def test_a_lease_that_has_ended_is_not_written(llama: Model, shared: SharedBlocks) -> None:
    engine = paged(llama)
    engine.generate([PROMPT], [ONE])
    lease = engine.export_prefix(PROMPT)
    assert lease is not None
    lease.release()
    with pytest.raises(LeaseEnded):
        shared.write(lease)


def prefill(channel: socket.socket) -> None:
    """In a process of its own: compute the prompt, send memory and manifest, and wait to be killed."""
    memory = SharedBlocks()
    manifest = written(paged(tiny_model("llama")), memory)
    socket.send_fds(channel, [json.dumps(manifest).encode()], [memory.handle])
    channel.recv(1)


@pytest.mark.world
def test_the_memory_of_a_killed_process_is_still_whole(llama: Model) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(300.0)
        process = forked.process(prefill, theirs)
        data, (handle,), *_ = socket.recv_fds(ours, 1 << 20, 1)
        process.kill()
        process.join(300.0)
    assert process.exitcode == -9
    mapped, engine = MappedBlocks(handle), paged(copy.deepcopy(llama))
    assert taken(engine, *mapped.read(json.loads(data))) == (7, 0, "")
    mapped.close()
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(3)]
    assert same(engine.generate([PROMPT] * 3, params), paged(llama).generate([PROMPT] * 3, params))
    assert engine.stats().prompt_tokens_computed == 2
