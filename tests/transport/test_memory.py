"""Weights through memory without a name: all kinds arrive, in versions that grow and shrink."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.transport.local import WeightSyncError
from millrace.transport.memory import MappedWeights, SharedWeights
from millrace.transport.sync import Note, WeightReceiver
from tests.transport.pieces import Named, Sampler, awkward


def receiver(shared: SharedWeights, sampler: Sampler) -> tuple[MappedWeights, WeightReceiver, list[Note]]:
    answers: list[Note] = []
    carrier = MappedWeights(shared.handle, answers.append)
    return carrier, WeightReceiver(carrier, sampler.load, sampler.held), answers


@pytest.fixture
def shared() -> Any:
    weights = SharedWeights()
    yield weights
    weights.close()


def test_every_kind_of_weight_arrives_again_and_again(shared: SharedWeights) -> None:
    sampler = Sampler(awkward())
    carrier, receiving, answers = receiver(shared, sampler)
    for version in range(3):
        carrier.note = shared.write(iter(awkward(version)), version)
        assert receiving.receive() == version
        assert sampler.holds(awkward(version))
        assert answers[-1]["error"] == ""
    assert os.fstat(shared.handle).st_size == carrier.note["bytes"]
    begins = [begin for _, _, begin in carrier.note["tensors"].values()]
    assert all(begin % 64 == 0 for begin in begins) and begins == sorted(begins)


@pytest.mark.parametrize("sizes", [(3, 9000), (9000, 3)])
def test_a_version_may_be_larger_or_smaller(shared: SharedWeights, sizes: tuple[int, int]) -> None:
    carrier = MappedWeights(shared.handle, print)
    for version, size in enumerate(sizes):
        sent: Named = [("w", torch.arange(size, dtype=torch.float64) + version)]
        carrier.note = shared.write(sent, version)
        ((name, tensor),) = carrier.take().named_tensors
        assert name == "w" and torch.equal(tensor, sent[0][1])


def test_what_was_changed_on_the_way_is_refused(shared: SharedWeights) -> None:
    sampler = Sampler(awkward())
    carrier, receiving, answers = receiver(shared, sampler)
    carrier.note = shared.write(awkward(), 0)
    os.pwrite(shared.handle, b"\x7f", carrier.note["tensors"]["large"][2] + 5)
    with pytest.raises(WeightSyncError, match="1 of 11 weights differ .* the first being large"):
        receiving.receive()
    assert answers[0]["error"].endswith("the first being large")
    carrier.note = shared.write(awkward(), 0)
    assert receiving.receive() == 0


def test_memory_that_is_too_small_is_refused(shared: SharedWeights) -> None:
    carrier = MappedWeights(shared.handle, print)
    carrier.note = shared.write(awkward(), 0)
    size = carrier.note["bytes"]
    os.ftruncate(shared.handle, 100)
    with pytest.raises(WeightSyncError, match=f"^the shared memory holds 100 bytes; {size} were sent$"):
        list(carrier.take().named_tensors)


def test_a_full_machine_is_an_error_and_not_a_crash(
    shared: SharedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, begin: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="^no room for 12 bytes in memory that processes share"):
        shared.write([("w", torch.zeros(3))], 0)


def test_it_has_no_name(shared: SharedWeights) -> None:
    before = sorted(os.listdir("/dev/shm"))
    shared.write(awkward(), 0)
    assert sorted(os.listdir("/dev/shm")) == before
    assert "memfd" in os.readlink(Path("/proc/self/fd") / str(shared.handle))
