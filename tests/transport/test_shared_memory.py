"""Weights through memory without a name: all kinds arrive, in versions that grow and shrink."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.transport.shared_memory import MappedWeights, SharedWeights
from millrace.transport.weight_update import WeightReceiver, WeightSyncError
from tests.transport.pieces import Elsewhere, Named, Sampler, awkward


def receiver(shared: SharedWeights, sampler: Sampler) -> tuple[MappedWeights, WeightReceiver, list[str]]:
    errors: list[str] = []
    incoming = MappedWeights(shared.handle, lambda error, verify_s: errors.append(error))
    return incoming, WeightReceiver(incoming, sampler.load, sampler.held), errors


@pytest.fixture
def shared() -> Any:
    weights = SharedWeights()
    yield weights
    weights.close()


def test_every_kind_of_weight_arrives_again_and_again(shared: SharedWeights) -> None:
    sampler = Sampler(awkward())
    incoming, receiving, errors = receiver(shared, sampler)
    for version in range(3):
        incoming.expect(shared.write(iter(awkward(version)), version))
        assert receiving.update_weights() == version
        assert sampler.holds(awkward(version))
        assert errors[-1] == ""
    assert os.fstat(shared.handle).st_size == incoming.manifest["bytes"]
    begins = [begin for _, _, begin in incoming.manifest["tensors"].values()]
    assert all(begin % 64 == 0 for begin in begins) and begins == sorted(begins)


@pytest.mark.parametrize("sizes", [(3, 9000), (9000, 3)])
def test_a_version_may_be_larger_or_smaller(shared: SharedWeights, sizes: tuple[int, int]) -> None:
    incoming = MappedWeights(shared.handle, print)
    for version, size in enumerate(sizes):
        sent: Named = [("w", torch.arange(size, dtype=torch.float64) + version)]
        incoming.expect(shared.write(sent, version))
        ((name, tensor),) = incoming.take().tensors
        assert name == "w" and torch.equal(tensor, sent[0][1])


def test_what_was_changed_on_the_way_is_refused(shared: SharedWeights) -> None:
    sampler = Sampler(awkward())
    incoming, receiving, errors = receiver(shared, sampler)
    incoming.expect(shared.write(awkward(), 0))
    os.pwrite(shared.handle, b"\x7f", incoming.manifest["tensors"]["large"][2] + 5)
    with pytest.raises(WeightSyncError, match="1 of 11 weights differ .* the first being large"):
        receiving.update_weights()
    assert errors[0].endswith("the first being large")
    incoming.expect(shared.write(awkward(), 0))
    assert receiving.update_weights() == 0


def test_memory_that_is_too_small_is_refused(shared: SharedWeights) -> None:
    incoming = MappedWeights(shared.handle, print)
    incoming.expect(shared.write(awkward(), 0))
    size = incoming.manifest["bytes"]
    os.ftruncate(shared.handle, 100)
    with pytest.raises(WeightSyncError, match=f"^the shared memory holds 100 bytes; {size} were sent$"):
        list(incoming.take().tensors)


def test_a_full_machine_is_an_error_and_not_a_crash(
    shared: SharedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, begin: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="^no room for 12 bytes in memory that processes share"):
        shared.write([("w", torch.zeros(3))], 0)


def test_it_has_no_name(shared: SharedWeights) -> None:
    shared.write(awkward(), 0)
    assert os.readlink(Path("/proc/self/fd") / str(shared.handle)).startswith("/memfd:")


@pytest.fixture
def elsewhere() -> Any:
    with closing(SharedWeights(delta=True)) as shared:
        there = Elsewhere(shared, awkward())
        yield there
        os.close(there.memory)


def moved(named: Named, num: int) -> Named:
    """The same weights but for some elements of the large one."""
    found = {name: tensor.clone() for name, tensor in named}
    found["large"].view(-1)[:num] += 1
    return list(found.items())


def test_only_what_changed_need_travel(elsewhere: Elsewhere) -> None:
    shared = elsewhere.shared
    first = shared.write(awkward(), 3)
    assert first["changes"] is None and shared.metrics == {}
    elsewhere.receive(first, patched=False)
    assert elsewhere.num_bytes >= 150_000
    for version, num in [(4, 100), (5, 9), (6, 0)]:
        sent = moved(awkward(), num)
        manifest = shared.write(sent, version)
        assert manifest["changes"]["base"] == version - 1
        elsewhere.receive(manifest, patched=True)
        assert elsewhere.sampler.holds(sent) and elsewhere.receiver.version == version
        # What is small travels whole. Between two weights lie up to 63 bytes.
        assert (
            elsewhere.num_bytes - 64 * 11
            < shared.metrics["weight_sync/payload_bytes"]
            <= elsewhere.num_bytes
            < 2000
        )
        assert (
            shared.metrics["weight_sync/payload_fraction"]
            == shared.metrics["weight_sync/payload_bytes"] / manifest["bytes"]
        )
    assert os.fstat(shared.handle).st_size > manifest["bytes"]


def test_who_holds_another_version_gets_all(elsewhere: Elsewhere) -> None:
    elsewhere.receive(elsewhere.shared.write(awkward(), 0), patched=False)
    for version in (1, 2):
        manifest = elsewhere.shared.write(awkward(version), version)
    elsewhere.receive(manifest, patched=False)
    assert elsewhere.sampler.holds(awkward(2))


def test_changes_on_the_wrong_weights_are_refused(elsewhere: Elsewhere) -> None:
    elsewhere.receive(elsewhere.shared.write(awkward(), 0), patched=False)
    elsewhere.shared.write(moved(awkward(), 50), 1)
    manifest = elsewhere.shared.write(moved(awkward(), 20), 2)
    with pytest.raises(WeightSyncError, match="1 of 11 weights differ .* the first being large"):
        elsewhere.receive(manifest, patched=True)
    elsewhere.receive(manifest, patched=False)
    assert elsewhere.sampler.holds(moved(awkward(), 20))


def test_changes_that_were_harmed_are_refused(elsewhere: Elsewhere) -> None:
    elsewhere.receive(elsewhere.shared.write(awkward(), 0), patched=False)
    manifest = elsewhere.shared.write(moved(awkward(), 50), 1)
    begin, _ = manifest["changes"]["packed"]["large"]
    os.pwrite(elsewhere.shared.handle, b"\xff\xff", begin)
    with pytest.raises(WeightSyncError, match="the changes of weight large do not fit 75000 elements"):
        elsewhere.receive(manifest, patched=True)


@pytest.mark.parametrize("other", [awkward()[:-1], awkward()[1:], [*awkward(), ("more", torch.ones(3))]])
def test_other_weights_travel_whole(elsewhere: Elsewhere, other: Named) -> None:
    shared = elsewhere.shared
    shared.write(awkward(), 0)
    assert shared.write(other, 1)["changes"] is None
    assert shared.metrics == {}
    assert shared.write(other, 2)["changes"]["base"] == 1


def test_nothing_can_be_said_after_a_version_that_failed(elsewhere: Elsewhere) -> None:
    shared = elsewhere.shared
    shared.write(awkward(), 0)
    with pytest.raises(WeightSyncError, match="given twice"):
        shared.write([*awkward(), *awkward()], 1)
    assert shared.write(awkward(), 2)["changes"] is None
