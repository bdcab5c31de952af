"""A canary travels with every transport, and a sampler that fails it does not have the version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from millrace.transport.canary import Canary
from millrace.transport.folder import FolderReceiver, FolderSender
from millrace.transport.local import WeightSyncError
from millrace.transport.memory import MappedWeights, SharedWeights
from millrace.transport.sync import Note, WeightReceiver, WeightSender
from tests.transport.pieces import InTurn, Sampler, awkward

CANARY = Canary((7, 8, 9), (-1.0, -2.5), 0.01)


class Singing(Sampler):
    """A sampler that says what it is told to of the canary's tokens."""

    found: Sequence[float] = CANARY.logprobs

    def logprobs_of(self, token_ids: Sequence[int]) -> Sequence[float]:
        assert tuple(token_ids) == CANARY.token_ids
        return self.found


def test_what_is_written_is_read_again() -> None:
    assert Canary.of(CANARY.note()) == CANARY
    assert CANARY.distance((-1.5, -2.5)) == 0.25


@pytest.mark.world
def test_it_travels_with_a_sender(tmp_path: Path) -> None:
    sampler = Singing(awkward())
    receiver = WeightReceiver(
        FolderReceiver(tmp_path, deadline_s=20.0), sampler.load, sampler.held, sampler.logprobs_of
    )
    with FolderSender(tmp_path, deadline_s=20.0) as carrier:
        sender = WeightSender(InTurn(carrier, [receiver]), canary=lambda: CANARY)
        sender.send(iter(awkward(1)), 1)
        assert receiver.version == 1
        sampler.found = (-1.0, -2.6)
        with pytest.raises(WeightSyncError, match="refused version 2: the sampler holds version 2 and c"):
            sender.send(iter(awkward(2)), 2)
        # It holds those weights, and is not to be asked for anything.
        assert receiver.version == 1 and sampler.holds(awkward(2))


def test_it_travels_in_shared_memory() -> None:
    sampler, weights = Singing(awkward()), SharedWeights()
    answers: list[Note] = []
    carrier = MappedWeights(weights.handle, answers.append)
    receiver = WeightReceiver(carrier, sampler.load, sampler.held, sampler.logprobs_of)
    for version, found in enumerate([CANARY.logprobs, (-9.0, -9.0)]):
        sampler.found = found
        carrier.note = weights.write(iter(awkward(version)), version, lambda: CANARY)
        if not version:
            assert receiver.receive() == 0
    with pytest.raises(WeightSyncError, match="version 1 was refused"):
        receiver.receive()
    assert [bool(answer["error"]) for answer in answers] == [False, True]
    weights.close()
