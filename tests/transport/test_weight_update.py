"""An engine's side of weight updates: what arrives is what was sent, or it is refused and says where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.fingerprint import fingerprint
from millrace.transport.shared_memory import MappedWeights, SharedWeights
from millrace.transport.weight_update import LocalTransport, WeightReceiver, WeightSyncError
from tests.transport.pieces import Named, Sampler, awkward


class Receiver:
    """A sampler's side of the transport; the subclasses below each do one thing wrong."""

    def __init__(self) -> None:
        self.weights = {name: torch.zeros(3) for name in ("a", "b", "c")}
        self.version = 0

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        for name, tensor in named_tensors:
            self.put(name, tensor)
        self.version = version

    def put(self, name: str, tensor: Tensor) -> None:
        self.weights[name] = tensor.clone()

    def fingerprint(self) -> dict[str, str]:
        return fingerprint(self.weights.items())


class KeepsTheOld(Receiver):
    def put(self, name: str, tensor: Tensor) -> None:
        if name != "b":
            super().put(name, tensor)


class RoundsOne(Receiver):
    def put(self, name: str, tensor: Tensor) -> None:
        super().put(name, tensor.bfloat16().float() if name == "c" else tensor)


class DropsOne(Receiver):
    def put(self, name: str, tensor: Tensor) -> None:
        super().put(name, tensor)
        self.weights.pop("a", None)


class HoldsOneMore(Receiver):
    def __init__(self) -> None:
        super().__init__()
        self.weights["extra"] = torch.zeros(1)


class Forgets(Receiver):
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = version


class Refuses(Receiver):
    def put(self, name: str, tensor: Tensor) -> None:
        raise ValueError(f"weight {name} is not one of the engine's")


class Stumbles(Receiver):
    """Does the first attempt wrong, by refusing it or by rounding a weight."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self.refuses, self.num_loads = refuses, 0

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.num_loads += 1
        if self.num_loads == 1 and self.refuses:
            raise ValueError("it was not in the mood")
        super().update_weights(named_tensors, version)
        if self.num_loads == 1:
            self.weights["c"] += 1.0


CANARY = Canary((4, 5, 6), (-1.0, -2.0), 0.3)


def send_to(receiver: Receiver) -> None:
    generator = torch.Generator().manual_seed(0)
    sent = ((name, torch.randn(3, generator=generator)) for name in ("a", "b", "c"))
    transport = LocalTransport(
        receiver.update_weights, receiver.fingerprint, lambda token_ids: CANARY.logprobs, lambda: CANARY
    )
    transport.update_weights(sent, 4)


def test_an_honest_receiver_holds_what_was_sent() -> None:
    receiver = Receiver()
    send_to(receiver)
    assert receiver.version == 4
    expected = torch.randn(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(receiver.weights["a"], expected)


@pytest.mark.parametrize("refuses", [True, False])
def test_what_fails_once_is_tried_again_with_the_same_tensors(refuses: bool) -> None:
    receiver, honest = Stumbles(refuses=refuses), Receiver()
    send_to(receiver)
    send_to(honest)
    assert (receiver.version, receiver.num_loads) == (4, 2)
    assert receiver.fingerprint() == honest.fingerprint()


@pytest.mark.parametrize(
    ("receiver", "num", "first"),
    [
        (KeepsTheOld, 1, "b"),
        (RoundsOne, 1, "c"),
        (DropsOne, 1, "a"),
        (HoldsOneMore, 1, "extra"),
        (Forgets, 3, "a"),
    ],
)
def test_a_receiver_that_holds_something_else_is_caught_by_name(
    receiver: type[Receiver], num: int, first: str
) -> None:
    with pytest.raises(WeightSyncError) as error:
        send_to(receiver())
    assert str(error.value) == (
        f"after version 4 was sent, {num} of 3 weights differ between trainer and sampler, "
        f"the first being {first}; it was tried twice"
    )


def test_a_refusal_is_passed_on() -> None:
    with pytest.raises(WeightSyncError) as error:
        send_to(Refuses())
    assert str(error.value) == (
        "the sampler refused version 4: weight a is not one of the engine's; it was tried twice"
    )
    refusal = error.value.__cause__
    assert isinstance(refusal, WeightSyncError) and isinstance(refusal.__cause__, ValueError)


def test_a_canary_that_is_no_number_to_the_trainer_is_not_asked() -> None:
    receiver = Receiver()
    transport = LocalTransport(
        receiver.update_weights,
        receiver.fingerprint,
        lambda token_ids: pytest.fail("it was asked"),
        lambda: Canary((4, 5, 6), (-1.0, float("nan")), 0.3),
    )
    transport.update_weights([(name, torch.ones(3)) for name in ("a", "b", "c")], 4)
    assert receiver.version == 4


@pytest.mark.parametrize(("found", "far"), [(-1.5, 0.25), (-1.0, 0.0), (-3.0, 1.0), (float("nan"), None)])
def test_a_sampler_that_computes_something_else_than_it_holds_is_caught(found: float, far: float) -> None:
    receiver, order = Receiver(), []

    def canary() -> Canary:
        order.append("trainer")
        return CANARY

    def logprobs_of(token_ids: Sequence[int]) -> list[float]:
        # What it computes with is there by then.
        assert (receiver.version, tuple(token_ids)) == (4, (4, 5, 6))
        order.append("sampler")
        return [found, -2.0]

    transport = LocalTransport(receiver.update_weights, receiver.fingerprint, logprobs_of, canary)
    sent = [(name, torch.ones(3)) for name in ("a", "b", "c")]
    if far is not None and far <= 0.3:
        transport.update_weights(sent, 4)
    else:
        with pytest.raises(WeightSyncError) as error:
            transport.update_weights(sent, 4)
        assert str(error.value).startswith(
            "the sampler holds version 4 and computes something else: its log-probabilities of 2 tokens are "
            f"{'nan' if far is None else '1'} from the trainer's in the mean, of which rounding explains 0.3"
        )
    assert order[:2] == ["trainer", "sampler"] and order.count("trainer") == 1


class Pair:
    """A trainer and a sampler of one process."""

    def __init__(self) -> None:
        self.shared, self.sampler = SharedWeights(), Sampler(awkward())
        self.answers: list[tuple[str, float]] = []
        self.incoming = MappedWeights(self.shared.handle, lambda *answer: self.answers.append(answer))
        self.receiver = WeightReceiver(self.incoming, self.sampler.load, self.sampler.held)

    def send(self, named: Named, version: int) -> int:
        self.incoming.manifest = self.shared.write(named, version)
        return self.receiver.update_weights()


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
    assert str(error.value) == f"version 2 was refused: {pair.answers[-1][0]}"
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
    ((error, verify_s),) = pair.answers
    assert error == "" and verify_s > 0.0
