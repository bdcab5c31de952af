"""Which groups make the next batch, and for which of them it waits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from millrace.rollout.staleness import GroupQueue, QueuedGroup


def queue(size: int, staleness: int, *, dynamic_sampling_rounds: int = 0, order: str = "start") -> GroupQueue:
    """`order` is `start`, `finish` or `none late`."""
    return GroupQueue(
        size=size,
        staleness=staleness,
        dynamic_sampling_rounds=dynamic_sampling_rounds,
        in_order=order == "start",
        none_late=order == "none late",
    )


def add(to: GroupQueue, *start_step: int) -> None:
    for step in start_step:
        number = max(to.groups, default=-1) + 1
        to.add(number, QueuedGroup(f"p{number}", step))


def finish(to: GroupQueue, *numbers: int, zero_std: bool = False) -> None:
    for number in numbers:
        to.finish(number, [to.groups[number].start_step], zero_std=zero_std)


def test_in_order_the_first_groups_make_the_batch():
    groups = queue(2, 1)
    add(groups, 0, 0, 0)
    finish(groups, 2, 1)
    assert groups.choose(0) == ([], [0])
    finish(groups, 0)
    assert groups.choose(0) == ([0, 1], [])
    groups.remove([0, 1])
    groups.check(1, 0)
    # One is ready, and the other has not started.
    assert groups.choose(1) == ([], [])
    add(groups, 1, 1, 1)
    groups.check(1, 0)


def test_equal_groups_are_replaced_by_the_next_in_order():
    groups = queue(2, 1, dynamic_sampling_rounds=2)
    add(groups, 0, 0, 0, 0)
    finish(groups, 0, 2, zero_std=True)
    # 2 takes the place of 0, and 3 that of 2, so that 4 and 5 make the next batch.
    add(groups, 0, 0)
    groups.check(0, 0)
    assert (groups.num_replaced, groups.num_rounds, groups.num_places) == (2, 2, 4)
    assert groups.choose(0) == ([], [1, 3])
    finish(groups, 1, 3)
    assert groups.choose(0) == ([0, 1, 2, 3], [])


def test_a_replacement_has_to_start():
    groups = queue(2, 0, dynamic_sampling_rounds=1)
    add(groups, 0, 0)
    finish(groups, 0)
    finish(groups, 1, zero_std=True)
    assert groups.choose(0) == ([], [])


def test_a_group_of_a_later_batch_is_not_yet_replaced():
    groups = queue(1, 3, dynamic_sampling_rounds=1)
    add(groups, 0, 0, 0)
    finish(groups, 1, zero_std=True)
    assert (groups.num_replaced, groups.num_places) == (0, 3)
    finish(groups, 0)
    groups.remove([0])
    assert (groups.num_replaced, groups.num_places) == (1, 1)


def test_without_refills_equal_groups_are_like_others():
    groups = queue(1, 0)
    add(groups, 0)
    finish(groups, 0, zero_std=True)
    assert not groups.groups[0].zero_std
    assert groups.choose(0) == ([0], [])


def test_as_they_finish_equal_ones_fill_places_last():
    groups = queue(2, 0, dynamic_sampling_rounds=1, order="finish")
    add(groups, *[0] * 6)
    finish(groups, 5, 4, 3, zero_std=True)
    assert (groups.num_replaced, groups.num_rounds, groups.num_places) == (2, 1, 4)
    assert groups.choose(0) == ([], [0, 1, 2])
    finish(groups, 2)
    assert groups.choose(0) == ([2, 3, 5, 4], [])
    finish(groups, 0)
    assert groups.choose(0) == ([2, 0, 5, 4], [])


def test_whoever_is_due_is_waited_for_and_comes_first():
    groups = queue(2, 1, order="none late")
    add(groups, 0, 0, 1, 1)
    finish(groups, 2, 3)
    assert groups.due(1) == {0, 1} and groups.due(0) == set()
    assert groups.choose(1) == ([], [0, 1])
    finish(groups, 1, 0)
    assert groups.choose(1) == ([1, 0], [])


def test_the_batch_after_next_must_have_room_for_all_that_are_due_in_it():
    groups = queue(1, 2, order="none late")
    add(groups, 0, 0, 1)
    finish(groups, 2)
    # 0 and 1 are due in batch 2, which has room for one.
    assert groups.choose(1) == ([], [0, 1])
    finish(groups, 1)
    assert groups.choose(1) == ([1], [])
    # Where there is room, the first that finished come first, however young they are.
    groups = queue(2, 2, order="none late")
    add(groups, 0, 1, 1, 1)
    finish(groups, 2, 3, 0)
    assert groups.choose(1) == ([2, 3], [])
    groups = queue(2, 2, order="none late")
    add(groups, 0, 1, 1, 2)
    finish(groups, 3, 0, 1)
    assert groups.choose(2) == ([0, 3], [])
    # Equal groups are not trained on, so none of them can be too old.
    groups = queue(1, 2, dynamic_sampling_rounds=1, order="none late")
    add(groups, 0, 0, 1)
    finish(groups, 0, zero_std=True)
    finish(groups, 2)
    assert groups.due(2) == {1}
    assert groups.choose(1) == ([2, 0], [])


def leaves_room(groups: GroupQueue, taken: Iterable[int], *, size: int, staleness: int, batch: int) -> bool:
    """Whether later batches can still train on every group before it is too old."""
    left = [groups.due(later) - {*taken} for later in range(batch, batch + staleness + 1)]
    return all(len(due) <= size * ahead for ahead, due in enumerate(left))


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_is_complete_as_soon_as_one_leaves_room_for_later_ones(seed):
    """Against every set of finished groups."""
    rng, batch = random.Random(seed), 5
    for _ in range(50):
        size, staleness = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        groups = queue(size, staleness, order="none late")
        most = size * (staleness + 1)
        add(groups, *sorted(rng.randint(batch - staleness, batch) for _ in range(rng.randint(1, most))))
        if any(len(groups.due(batch + k)) > size * (k + 1) for k in range(staleness + 1)):
            continue
        finish(groups, *rng.sample(list(groups.groups), rng.randint(0, len(groups.groups))))
        able = [
            taken
            for taken in itertools.combinations(groups.arrived, size)
            if leaves_room(groups, taken, size=size, staleness=staleness, batch=batch)
        ]
        chosen, missing = groups.choose(batch)
        assert bool(chosen) == bool(able)
        assert not chosen or tuple(sorted(chosen)) in {tuple(sorted(taken)) for taken in able}
        assert all(groups.groups[number].oldest_steps is None for number in missing)


def test_what_does_not_hold_is_said():
    groups = queue(1, 1)
    add(groups, 0, 0)
    groups.check(0, 0)
    with pytest.raises(AssertionError, match="group 1 would wait until batch 2"):
        groups.check(1, 0)
    groups.arrived.append(1)
    with pytest.raises(AssertionError, match=r"groups \[1\] arrived, but \[\] are finished"):
        groups.check(0, 0)
    groups = queue(1, 1, order="none late")
    add(groups, 0, 0)
    groups.check(0, 0)
    groups.check(1, 1)
    with pytest.raises(AssertionError, match="2 groups must be trained on by batch 1"):
        groups.check(1, 0)
