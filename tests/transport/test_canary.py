"""A canary travels with every transport, and a sampler that fails it does not have the version."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millrace.transport.canary import Canary
from millrace.transport.shared_memory import MappedWeights, SharedWeights
from millrace.transport.weight_update import WeightReceiver, WeightSyncError
from tests.transport.pieces import Sampler, awkward

CANARY = Canary((7, 8, 9), (-1.0, -2.5), 0.01)


class Singing(Sampler):
    """A sampler that says what it is told to of the canary's tokens."""

    found: Sequence[float] = CANARY.logprobs

    def logprobs_of(self, token_ids: Sequence[int]) -> Sequence[float]:
        assert tuple(token_ids) == CANARY.token_ids
        return self.found


def test_what_is_written_is_read_again() -> None:
    assert Canary.of(CANARY.fields()) == CANARY
    assert CANARY.distance((-1.5, -2.5)) == 0.25


def test_it_travels_in_shared_memory() -> None:
    sampler, weights = Singing(awkward()), SharedWeights()
    errors: list[str] = []
    incoming = MappedWeights(weights.handle, lambda error, verify_s: errors.append(error))
    receiver = WeightReceiver(incoming, sampler.load, sampler.held, sampler.logprobs_of)
    for version, found in enumerate([CANARY.logprobs, (-9.0, -9.0)]):
        sampler.found = found
        incoming.expect(weights.write(iter(awkward(version)), version, lambda: CANARY))
        if not version:
            assert receiver.update_weights() == 0
    with pytest.raises(WeightSyncError, match="version 1 was refused"):
        receiver.update_weights()
    assert list(map(bool, errors)) == [False, True]
    weights.close()
