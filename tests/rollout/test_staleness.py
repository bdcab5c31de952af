"""Which groups start, which are trained on, and what becomes of the others, under thousands of schedules."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from millrace.eventlog.log import check_log, resumed_state
from millrace.rollout.batches import check_resumed
from millrace.rollout.staleness import GroupQueue, StalenessController, StalenessPolicy, TakenBatch, TooStale

ORDERS = [("submission", "wait"), *(("completion", stale) for stale in ("wait", "drop", "keep", "withhold"))]


class World:
    """Drives a flow as engines, rewards, a trainer and crashes would, with chance in place of time."""

    def __init__(self, rules: StalenessPolicy, rng: random.Random, *, num_batches: int = 6) -> None:
        self.rules, self.rng, self.num_batches = rules, rng, num_batches
        self.events: list[dict[str, Any]] = []
        self.running: dict[int, int] = {}
        self.batches: list[TakenBatch] = []
        self.num_new = 0
        self.zero_std_fraction = rng.choice([0.0, 0.3, 0.9])
        self.newest_first = rng.choice([0.0, 0.9])
        self.controller = self.new_controller()
        self.log_event("begin", rules=self.controller.state()["rules"], num_batches=num_batches)
        self.log_event("weights_loaded", engine="0", step=0)

    def new_controller(self) -> StalenessController:
        return StalenessController(self.rules, num_batches=self.num_batches, log_event=self.log_event)

    def log_event(self, kind: str, /, **facts: Any) -> None:
        self.events.append({"kind": kind, **json.loads(json.dumps(facts))})

    def start(self) -> None:
        while self.controller.num_free and self.rng.random() < 0.8:
            if not self.controller.repeats:
                self.num_new += 1
            prompt = self.controller.repeats[0] if self.controller.repeats else f"p{self.num_new}"
            self.running[self.controller.start(prompt)] = self.controller.num_updates

    def finish(self) -> None:
        if self.running:
            numbers = list(self.running)
            number = numbers[-1] if self.rng.random() < self.newest_first else self.rng.choice(numbers)
            start_step = self.running.pop(number)
            oldest_steps = [self.rng.randint(start_step, self.controller.num_updates) for _ in range(3)]
            oldest_steps[self.rng.randrange(3)] = start_step
            for sample, step in enumerate(oldest_steps):
                facts = {
                    "number": number,
                    "sample": sample,
                    "turn": 0,
                    "oldest_step": step,
                    "newest_step": step,
                }
                self.log_event("completed", **facts, engine="0")
            self.controller.finish(number, oldest_steps, zero_std=self.rng.random() < self.zero_std_fraction)

    def retry(self) -> None:
        """An engine died: the group is drawn again, by newer weights."""
        if self.running:
            self.running[self.rng.choice(list(self.running))] = self.controller.num_updates

    def take(self) -> None:
        taken = self.controller.take()
        if taken is not None:
            self.batches.append(taken)
            for dropped in taken.dropped:
                self.running.pop(dropped.number, None)

    def update(self) -> None:
        if self.controller.num_updates < self.controller.num_taken:
            self.log_event("weights_loaded", engine="0", step=self.controller.num_updates + 1)
            self.controller.weights_updated()

    def resume(self) -> None:
        """The run stops and goes on from what it saved."""
        state = json.loads(json.dumps(self.controller.state()))
        self.controller = self.new_controller()
        left = resumed_state(self.events)
        self.controller.load_state(state)
        check_resumed(self.controller, left)
        assert self.controller.unfinished.keys() == self.running.keys()
        self.log_event("weights_loaded", engine="0", step=self.controller.num_updates)
        self.running = dict.fromkeys(self.running, self.controller.num_updates)

    def turn(self) -> None:
        actions = [self.start] * 3 + [self.finish] * 6 + [self.take] * 3 + [self.update] * 2 + [self.retry]
        self.rng.choice(actions)()
        if self.rng.random() < 0.01:
            self.resume()
        self.controller.check()

    def run(self) -> None:
        for _ in range(20_000):
            if self.controller.num_updates == self.num_batches:
                return
            self.turn()
        raise AssertionError(
            f"no end: waits for {self.controller.waits_for()}, {self.controller.num_free} free"
        )


def random_rules(rng: random.Random) -> StalenessPolicy:
    order, stale = rng.choice(ORDERS)
    staleness = rng.choice([0, 1, 2, 4]) if stale == "wait" else rng.choice([1, 2, 4])
    return StalenessPolicy(
        groups_per_step=rng.choice([1, 2, 5]),
        staleness=staleness,
        order=order,
        stale=stale,
        dynamic_sampling_rounds=rng.choice([0, 0, 1, 3]),
        oversample_groups=rng.choice([0, 2]) if order == "completion" and not staleness else 0,
    )


def check_batches(world: World) -> None:
    """What holds of every run, whatever its schedule was."""
    rules, trained = world.rules, Counter(n for taken in world.batches for n in taken.numbers)
    assert [taken.batch for taken in world.batches] == list(range(world.num_batches))
    assert set(trained.values()) == {1}
    for taken in world.batches:
        num_replaced = len(taken.numbers) - rules.groups_per_step
        assert 0 <= num_replaced <= rules.dynamic_sampling_rounds * rules.groups_per_step
        assert num_replaced <= len(taken.left_out)
        ages = [s for place, s in enumerate(taken.staleness) if place not in taken.left_out]
        assert all(age >= 0 for age in ages)
        if rules.stale != "keep":
            assert max(ages, default=0) <= rules.staleness
    assert check_log(world.events) == []


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("part", range(10))
def test_no_schedule_loses_doubles_or_ages_a_group(part):
    for seed in range(part * 100, (part + 1) * 100):
        rng = random.Random(seed)
        world = World(random_rules(rng), rng)
        try:
            world.run()
            check_batches(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {world.rules}: {error}") from error


def synchronous(rules: StalenessPolicy, zero_std: set[int]) -> tuple[list[int], set[int], int]:
    """A batch as a loop makes it that starts a round, waits for all of it, and starts the next one.

    `zero_std` has the prompts, numbered in the order they are asked, that get equal rewards. The groups,
    places of those left out, and rounds beyond the first.
    """
    groups: list[int] = []
    left_out: set[int] = set()
    missing, num_rounds = rules.groups_per_step, 0
    while True:
        groups += range(len(groups), len(groups) + missing)
        if rules.dynamic_sampling_rounds:
            left_out = {place for place, group in enumerate(groups) if group in zero_std}
            missing = rules.groups_per_step - len(groups) + len(left_out)
        if num_rounds == rules.dynamic_sampling_rounds or not missing:
            return groups, left_out, num_rounds
        num_rounds += 1


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("dynamic_sampling_rounds", range(4))
def test_at_staleness_0_a_batch_is_what_the_synchronous_loop_takes(dynamic_sampling_rounds):
    for seed in range(300):
        rng = random.Random(seed)
        rules = StalenessPolicy(rng.choice([1, 3, 4]), 0, dynamic_sampling_rounds=dynamic_sampling_rounds)
        controller, running, first = StalenessController(rules, num_batches=3), [], 0
        for batch in range(3):
            zero_std = {n for n in range(40) if rng.random() < 0.5}
            while (taken := controller.take()) is None:
                while controller.num_free:
                    running.append(controller.start("p"))
                number = running.pop(rng.randrange(len(running)))
                controller.finish(number, [batch, batch], zero_std=number - first in zero_std)
            groups, left_out, num_rounds = synchronous(rules, zero_std)
            assert list(taken.numbers) == [first + group for group in groups]
            assert (taken.left_out, taken.num_rounds) == (left_out, num_rounds)
            assert taken.staleness == (0,) * len(groups)
            first += len(groups)
            assert not running and not controller.num_free and not controller.waits_for()
            controller.weights_updated()


def started(rules: StalenessPolicy, count: int, **given: Any) -> StalenessController:
    """A flow in which so many groups run."""
    controller = StalenessController(rules, num_batches=given.pop("num_batches", 9), **given)
    for number in range(count):
        controller.start(f"p{number}")
    return controller


def finish(
    controller: StalenessController,
    *numbers: int,
    oldest_steps: tuple[int, ...] = (0, 0),
    zero_std: bool = False,
) -> None:
    for number in numbers:
        controller.finish(number, oldest_steps, zero_std=zero_std)


def test_tickets_are_freed_when_the_weights_are_in_force():
    controller = started(StalenessPolicy(2, 1), 4)
    assert controller.num_free == 0
    finish(controller, 1, 2, 3)
    assert controller.take() is None and controller.waits_for() == [0]
    finish(controller, 0)
    taken = controller.take()
    assert taken is not None and (taken.numbers, taken.staleness) == ((0, 1), (0, 0))
    assert controller.num_free == 0
    controller.weights_updated()
    assert controller.num_free == 2
    # A batch may be taken while the one before still awaits its weight update.
    second = controller.take()
    assert second is not None and (second.numbers, second.staleness) == ((2, 3), (1, 1))
    assert (controller.num_free, controller.num_taken, controller.num_updates) == (2, 2, 1)


def test_nothing_starts_that_no_batch_has_a_place_for():
    controller = started(StalenessPolicy(2, 3), 4, num_batches=2)
    assert controller.num_free == 0
    finish(controller, 0, 1)
    assert controller.take() is not None
    controller.weights_updated()
    assert controller.num_free == 0
    finish(controller, 2, 3)
    last = controller.take()
    assert last is not None and last.numbers == (2, 3)
    controller.weights_updated()
    assert controller.num_free == 0 and controller.take() is None


def test_an_equal_group_is_replaced_before_its_round_has_ended():
    controller = started(StalenessPolicy(2, 0, dynamic_sampling_rounds=1), 2)
    finish(controller, 1, zero_std=True)
    assert controller.num_free == 1 and controller.start("p2") == 2
    # The one round is used up: what is equal now is a place that teaches nothing.
    finish(controller, 2, zero_std=True)
    assert controller.num_free == 0
    finish(controller, 0, zero_std=False)
    taken = controller.take()
    assert taken is not None and (taken.numbers, taken.left_out) == ((0, 1, 2), {1, 2})
    assert taken.num_rounds == 1


def overtaken(stale: str, *, oldest_steps: tuple[int, ...] = (0, 0)) -> StalenessController:
    """Group 0 is still running at a staleness of 1, when groups started later are ready for batch 2."""
    controller = started(StalenessPolicy(1, 1, order="completion", stale=stale), 2)
    finish(controller, 1)
    assert controller.take() is not None
    controller.weights_updated()
    if stale == "wait":
        return controller
    finish(controller, controller.start("p2"), oldest_steps=(1, 1))
    assert controller.take() is not None
    controller.weights_updated()
    finish(controller, 0, oldest_steps=oldest_steps)
    return controller


def test_wait_leaves_no_group_behind_that_would_be_too_old():
    controller = overtaken("wait")
    finish(controller, controller.start("p2"), oldest_steps=(1, 1))
    assert controller.take() is None and controller.waits_for() == [0]
    finish(controller, 0)
    taken = controller.take()
    assert taken is not None and (taken.numbers, taken.staleness) == ((0,), (1,))


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_a_batch_that_is_too_old_is_refused_also_where_tickets_failed_to_prevent_it(order, monkeypatch):
    monkeypatch.setattr(StalenessController, "num_free", 1)
    monkeypatch.setattr(GroupQueue, "due", lambda line, batch: set())
    controller = started(StalenessPolicy(1, 1, order=order), 3)
    finish(controller, 0, 1, 2)
    for number, age in enumerate((0, 1)):
        taken = controller.take()
        assert taken is not None and (taken.numbers, taken.staleness) == ((number,), (age,))
    before = controller.state()
    with pytest.raises(TooStale) as error:
        controller.take()
    assert str(error.value) == "group 2 would have staleness 2 in batch 2; the bound is 1"
    assert controller.state() == before


def test_drop_starts_the_prompt_again():
    controller = overtaken("drop")
    assert controller.take() is None and controller.repeats == ("p0",)
    with pytest.raises(ValueError, match="p9 cannot start: p0 starts again before it"):
        controller.start("p9")
    finish(controller, controller.start("p0"), oldest_steps=(2, 2))
    assert controller.repeats == ()
    taken = controller.take()
    assert taken is not None and taken.numbers == (3,)
    assert [(d.number, d.prompt_id, d.reason) for d in taken.dropped] == [(0, "p0", "stale")]


def test_keep_trains_on_what_is_too_old():
    taken = overtaken("keep").take()
    assert taken is not None and (taken.numbers, taken.staleness, taken.withheld) == ((0,), (2,), {})


def test_withhold_leaves_out_the_trajectories_that_are_too_old():
    taken = overtaken("withhold", oldest_steps=(0, 1, 2, 0)).take()
    assert taken is not None and (taken.numbers, taken.staleness) == ((0,), (1,))
    assert taken.withheld == {0: (0, 3)}
    # One trajectory has nothing to be compared with.
    controller = overtaken("withhold", oldest_steps=(0, 0, 0, 2))
    assert controller.take() is None and controller.repeats == ("p0",)


def test_spare_groups_are_ended_when_the_batch_is_full():
    controller = started(StalenessPolicy(2, 0, order="completion", oversample_groups=2), 4)
    assert controller.num_free == 0
    finish(controller, 3)
    assert controller.take() is None and controller.waits_for() == [0, 1, 2]
    finish(controller, 1)
    taken = controller.take()
    assert taken is not None and taken.numbers == (1, 3)
    assert [(d.number, d.reason) for d in taken.dropped] == [(0, "spare"), (2, "spare")]
    assert controller.num_free == 0 and controller.repeats == ("p0", "p2")
    controller.weights_updated()
    assert controller.num_free == 4


def test_a_flow_continues_from_its_state():
    rules, noted = StalenessPolicy(1, 1, order="completion", stale="drop"), []
    controller = overtaken("drop")
    controller.start("p0")
    state = json.loads(json.dumps(controller.state()))
    again = StalenessController(
        rules, num_batches=9, log_event=lambda kind, **facts: noted.append((kind, facts))
    )
    again.load_state(state)
    assert again.unfinished == {3: "p0"} and again.num_updates == again.num_taken == 2
    assert noted == [("resume", {"numbers": [3], "taken": 2, "num_batches": 9})]
    for one in (controller, again):
        finish(one, 3, oldest_steps=(2, 2))
    taken = again.take()
    assert taken is not None and taken == controller.take() and taken.numbers == (3,)
    # What was dropped before it was saved is told with the first batch after.
    assert [d.reason for d in taken.dropped] == ["stale"]
    with pytest.raises(ValueError, match="saved under"):
        StalenessController(StalenessPolicy(3, 1), num_batches=9).load_state(state)


def test_what_cannot_be_is_refused():
    controller = started(StalenessPolicy(1, 0), 1)
    with pytest.raises(ValueError, match="p1 cannot start: 1 places are held and none is free"):
        controller.start("p1")
    with pytest.raises(ValueError, match="weight update 1 has no batch; 0 are taken"):
        controller.weights_updated()
    with pytest.raises(ValueError, match="without a trajectory"):
        controller.finish(0, [], zero_std=False)
    with pytest.raises(ValueError, match="an engine missed a weight update"):
        controller.finish(0, [0, 1], zero_std=False)
    finish(controller, 0)
    for number, why in ((0, "finished already"), (1, "never started")):
        with pytest.raises(ValueError, match=f"group {number} is not running: .*{why}"):
            finish(controller, number)
    assert controller.take() is not None
    controller.weights_updated()
    number = controller.start("p1")
    with pytest.raises(ValueError, match=r"started at step 1.*steps \[0, 1\]"):
        controller.finish(number, [1, 0], zero_std=False)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"groups_per_step": 0}, "groups_per_step is 0; it must be at least 1"),
        ({"staleness": -1}, "staleness is -1; it must be at least 0"),
        ({"stale": "drop"}, "stale drop needs completion order"),
        ({"stale": "keep", "order": "completion", "staleness": 0}, "stale keep needs completion order"),
        ({"oversample_groups": 1, "staleness": 0}, "oversample_groups is 1; it needs completion order"),
        (
            {"oversample_groups": 1, "order": "completion"},
            "oversample_groups is 1; it needs completion order",
        ),
    ],
)
def test_rules_without_effect_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        StalenessPolicy(**{"groups_per_step": 2, "staleness": 1, **given})


def test_nothing_is_replaced_or_spare_unless_asked_for():
    rules = StalenessPolicy(4, 0)
    assert (rules.order, rules.stale, rules.dynamic_sampling_rounds, rules.oversample_groups) == (
        "submission",
        "wait",
        0,
        0,
    )
