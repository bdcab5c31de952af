"""Two halves over a folder: what arrives is what was sent, or the hand-over fails and says where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millrace.transport.folder import FolderReceiver
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import WeightReceiver
from tests.transport.pieces import MakePair, Named, Sampler, awkward


@pytest.mark.world
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("file_bytes", [1, 200, 1 << 30])
@pytest.mark.parametrize("reuse", [False, True])
def test_every_bit_arrives(
    tmp_path: Path, make_pair: MakePair, delta: bool, file_bytes: int, reuse: bool
) -> None:
    pair = make_pair(tmp_path, awkward(), num_samplers=2, delta=delta, file_bytes=file_bytes, reuse=reuse)
    for version, seed in enumerate([4, 5, 5, 6]):
        pair.sender.send(iter(awkward(seed)), version)
        assert [sampler.holds(awkward(seed)) for sampler in pair.samplers] == [True, True]
        assert [sampler.version for sampler in pair.samplers] == [version, version]
        assert [receiver.version for receiver in pair.receivers] == [version, version]


@pytest.mark.world
def test_the_metrics_count_bytes(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward(), delta=True)
    total = sum(tensor.nbytes for _, tensor in awkward())
    pair.sender.send(awkward(), 0)
    assert pair.sender.metrics["sync/payload_bytes"] == total
    assert pair.sender.metrics["sync/payload_share"] == 1.0
    pair.sender.send(awkward(), 1)
    # Nothing changed: a count for each block remains, two blocks in the large one. Two weights of one element
    # or none, of no more than four bytes, travel whole.
    assert pair.sender.metrics["sync/payload_bytes"] == 4 * 10 + 4
    assert pair.sender.metrics["sync/payload_share"] == 44 / total
    assert pair.sender.metrics["time/verify_s"] > 0.0


@pytest.mark.world
@pytest.mark.parametrize("name", ["flags", "half", "head", "large"])
def test_a_bit_that_flips_on_the_way_is_found_and_named(
    tmp_path: Path, make_pair: MakePair, name: str
) -> None:
    pair = make_pair(tmp_path, awkward(), reuse=True)
    pair.carrier.harm = lambda: pair.flip(name)
    with pytest.raises(WeightSyncError) as error:
        pair.sender.send(awkward(1), 3)
    assert str(error.value) == (
        "sampler 0 refused version 3: after version 3 was sent, 1 of 11 weights differ between trainer and "
        f"sampler, the first being {name}; it was tried twice"
    )
    assert pair.receivers[0].version is None
    assert pair.carrier.num_sent == 2
    pair.carrier.harm = lambda: None
    pair.sender.send(awkward(1), 3)
    assert pair.samplers[0].holds(awkward(1))


def changed_in_one(seed: int) -> list[tuple[str, Tensor]]:
    named = awkward()
    dict(named)["large"][seed, 3] += 1
    return named


def once(action: Callable[[], object]) -> Callable[[], None]:
    """The action, the first time that it is called for."""
    left = [action]

    def harm() -> None:
        if left:
            left.pop()()

    return harm


@pytest.mark.world
def test_a_bit_that_flips_once_costs_a_second_attempt_of_all(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward(), num_samplers=2)
    pair.carrier.harm = once(lambda: pair.flip("large"))
    pair.sender.send(awkward(1), 3)
    assert pair.carrier.num_sent == 2
    assert [sampler.holds(awkward(1)) for sampler in pair.samplers] == [True, True]
    assert [receiver.version for receiver in pair.receivers] == [3, 3]


@pytest.mark.world
def test_one_sampler_that_fails_once_has_it_sent_to_all_again(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward(), num_samplers=3, delta=True)
    pair.sender.send(awkward(), 0)
    with torch.no_grad():
        next(iter(pair.receivers[1]._delta._held.values())).add_(1.0)
    pair.sender.send(awkward(), 1)
    assert pair.carrier.num_sent == 3
    assert pair.sender.metrics["sync/payload_share"] == 1.0
    assert [receiver.version for receiver in pair.receivers] == [1, 1, 1]


@pytest.mark.world
def test_what_is_gathered_on_the_way_is_sent_once(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward())
    pair.carrier.harm = once(lambda: pair.flip("large"))
    with pytest.raises(WeightSyncError, match="the first being large$"):
        pair.sender.send(iter(awkward(1)), 3)
    assert pair.carrier.num_sent == 1
    pair.sender.send(iter(awkward(1)), 3)
    assert pair.samplers[0].holds(awkward(1))


@pytest.mark.world
def test_a_bit_that_flips_among_the_changes_is_found_and_all_is_sent_again(
    tmp_path: Path, make_pair: MakePair
) -> None:
    pair = make_pair(tmp_path, awkward(), delta=True)
    pair.sender.send(awkward(), 0)
    pair.carrier.harm = once(lambda: pair.flip("changes:large"))
    pair.sender.send(changed_in_one(2), 1)
    assert pair.carrier.num_sent == 3
    assert pair.sender.metrics["sync/payload_share"] == 1.0
    assert pair.samplers[0].holds(changed_in_one(2))
    pair.sender.send(changed_in_one(9), 2)
    assert pair.sender.metrics["sync/payload_share"] < 0.01
    assert pair.samplers[0].holds(changed_in_one(9))


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
    (lambda named: [("other", torch.ones(2)), *named], "weight other is not one of the engine's"),
]


@pytest.mark.world
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_what_the_engine_refuses_is_said_and_changes_nothing(
    tmp_path: Path, make_pair: MakePair, change: Callable[[Named], Named], sentence: str, delta: bool
) -> None:
    pair = make_pair(tmp_path, awkward(), delta=delta)
    pair.sender.send(awkward(), 1)
    with pytest.raises(WeightSyncError) as error:
        pair.sender.send(change(awkward(7)), 2)
    assert str(error.value) == f"sampler 0 refused version 2: {sentence}; it was tried twice"
    assert pair.samplers[0].holds(awkward())
    assert (pair.samplers[0].version, pair.receivers[0].version) == (1, 1)
    pair.sender.send(awkward(8), 2)
    assert pair.samplers[0].holds(awkward(8))


def test_a_name_given_twice_is_refused_before_anything_is_loaded(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward())
    with pytest.raises(WeightSyncError, match="^weight matrix was given twice$"):
        pair.sender.send([*awkward(), awkward()[0]], 1)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.world
def test_an_older_version_is_refused_and_the_same_one_is_not(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward())
    pair.sender.send(awkward(), 4)
    with pytest.raises(WeightSyncError, match="version 3 was sent after version 4; it was tried twice$"):
        pair.sender.send(awkward(1), 3)
    assert pair.samplers[0].holds(awkward())
    pair.sender.send(awkward(2), 4)
    assert pair.samplers[0].holds(awkward(2))


@pytest.mark.world
def test_one_sampler_that_refuses_is_enough(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward(), num_samplers=3)
    pair.receivers[1].version = 8
    with pytest.raises(WeightSyncError) as error:
        pair.sender.send(awkward(), 5)
    assert str(error.value) == (
        "sampler 1 refused version 5 (1 of 3 samplers did): version 5 was sent after version 8; "
        "it was tried twice"
    )


@pytest.mark.world
def test_a_sampler_that_begins_anew_needs_everything(tmp_path: Path, make_pair: MakePair) -> None:
    pair = make_pair(tmp_path, awkward(), delta=True)
    pair.sender.send(awkward(), 0)
    sampler = Sampler(awkward())
    anew = WeightReceiver(FolderReceiver(tmp_path, deadline_s=20.0), sampler.load, sampler.held)
    pair.carrier.receivers = [anew]
    with pytest.raises(WeightSyncError, match="changes since version 0 were sent, and none is held$"):
        pair.sender.send(iter(awkward(3)), 1)
    assert not sampler.holds(awkward(3))
    pair.sender.send(awkward(3), 1)
    assert sampler.holds(awkward(3))
