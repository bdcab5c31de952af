"""The receiving half over shared memory: what arrives is what was sent, or it is refused and says where."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from millrace.transport.local import WeightSyncError
from millrace.transport.shared_memory import MappedWeights, SharedWeights
from millrace.transport.sync import Note, WeightReceiver
from tests.transport.pieces import Named, Sampler, awkward


class Pair:
    """A trainer and a sampler of one process."""

    def __init__(self) -> None:
        self.shared, self.sampler = SharedWeights(), Sampler(awkward())
        self.answers: list[Note] = []
        self.carrier = MappedWeights(self.shared.handle, self.answers.append)
        self.receiver = WeightReceiver(self.carrier, self.sampler.load, self.sampler.held)

    def send(self, named: Named, version: int) -> int:
        self.carrier.expect(self.shared.write(named, version))
        return self.receiver.receive()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.shared.close()


def without(name: str) -> Callable[[Named], Named]:
    return lambda named: [pair for pair in named if pair[0] != name]


def with_other(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Named], Named]:
    return lambda named: [(n, change(t) if n == name else t) for n, t in named]


WRONG: list[tuple[Callable[[Named], Named], str]] = [
    (without("half"), "1 weights were not sent, the first being half"),
    (
        with_other("matrix", lambda t: t.T),
        "weight matrix was sent as (3, 7) torch.float32; the engine holds (7, 3) torch.float32",
    ),
    (
        with_other("half", lambda t: t.half()),
        "weight half was sent as (5, 1, 3) torch.float16; the engine holds (5, 1, 3) torch.bfloat16",
    ),
    (with_other("counts", lambda t: t.view(3, 2)), "weight counts was sent as (3, 2) torch.int64"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_what_the_engine_refuses_is_said_and_changes_nothing(pair: Pair, change, sentence: str) -> None:
    pair.send(awkward(), 1)
    with pytest.raises(WeightSyncError) as error:
        pair.send(change(awkward(7)), 2)
    assert str(error.value).startswith(f"version 2 was refused: {sentence}")
    assert str(error.value) == f"version 2 was refused: {pair.answers[-1]['error']}"
    assert pair.sampler.holds(awkward())
    assert (pair.sampler.version, pair.receiver.version) == (1, 1)
    assert pair.send(awkward(8), 2) == 2
    assert pair.sampler.holds(awkward(8))


def test_an_older_version_is_refused_and_the_same_one_is_not(pair: Pair) -> None:
    pair.send(awkward(), 4)
    with pytest.raises(WeightSyncError, match="^version 3 was refused: version 3 was sent after version 4$"):
        pair.send(awkward(1), 3)
    assert pair.sampler.holds(awkward())
    pair.send(awkward(2), 4)
    assert pair.sampler.holds(awkward(2))


def test_an_answer_tells_how_long_the_proof_took(pair: Pair) -> None:
    pair.send(awkward(), 0)
    assert pair.answers[0]["error"] == "" and pair.answers[0]["verify_s"] > 0.0
