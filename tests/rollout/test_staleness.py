"""Which groups start, which are trained on, and what becomes of the others, under thousands of schedules."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from millrace.eventlog.log import check_log, flow_after
from millrace.rollout.batches import check_resumed
from millrace.rollout.staleness import GroupQueue, StalenessController, StalenessPolicy, TakenBatch, TooStale

ORDERS = [("submission", "wait"), *(("completion", stale) for stale in ("wait", "drop", "keep", "withhold"))]


class World:
    """Drives a flow as engines, rewards, a trainer and crashes would, with chance in place of time."""

    def __init__(self, rules: StalenessPolicy, rng: random.Random, *, num_batches: int = 6) -> None:
        self.rules, self.rng, self.num_batches = rules, rng, num_batches
        self.lines: list[dict[str, Any]] = []
        self.running: dict[int, int] = {}
        self.batches: list[TakenBatch] = []
        self.num_new = 0
        self.equal_fraction = rng.choice([0.0, 0.3, 0.9])
        self.newest_first = rng.choice([0.0, 0.9])
        self.flow = self.new_flow()
        self.note("begin", rules=self.flow.state()["rules"], num_batches=num_batches)
        self.note("load", engine="0", version=0)

    def new_flow(self) -> StalenessController:
        return StalenessController(self.rules, num_batches=self.num_batches, note=self.note)

    def note(self, kind: str, /, **facts: Any) -> None:
        self.lines.append({"kind": kind, **json.loads(json.dumps(facts))})

    def start(self) -> None:
        while self.flow.num_free and self.rng.random() < 0.8:
            if not self.flow.repeats:
                self.num_new += 1
            prompt = self.flow.repeats[0] if self.flow.repeats else f"p{self.num_new}"
            self.running[self.flow.start(prompt)] = self.flow.num_published

    def finish(self) -> None:
        if self.running:
            numbers = list(self.running)
            number = numbers[-1] if self.rng.random() < self.newest_first else self.rng.choice(numbers)
            born = self.running.pop(number)
            births = [self.rng.randint(born, self.flow.num_published) for _ in range(3)]
            births[self.rng.randrange(3)] = born
            for sample, birth in enumerate(births):
                facts = {"number": number, "sample": sample, "turn": 0, "oldest": birth, "newest": birth}
                self.note("arrive", **facts, engine="0")
            self.flow.finish(number, births, equal=self.rng.random() < self.equal_fraction)

    def retry(self) -> None:
        """An engine died: the group is drawn again, by newer weights."""
        if self.running:
            self.running[self.rng.choice(list(self.running))] = self.flow.num_published

    def take(self) -> None:
        taken = self.flow.take()
        if taken is not None:
            self.batches.append(taken)
            for dropped in taken.dropped:
                self.running.pop(dropped.number, None)

    def publish(self) -> None:
        if self.flow.num_published < self.flow.num_taken:
            self.note("load", engine="0", version=self.flow.num_published + 1)
            self.flow.published()

    def resume(self) -> None:
        """The run stops and goes on from what it saved."""
        state = json.loads(json.dumps(self.flow.state()))
        self.flow = self.new_flow()
        left = flow_after(self.lines)
        self.flow.load_state(state)
        check_resumed(self.flow, left)
        assert self.flow.unfinished.keys() == self.running.keys()
        self.note("load", engine="0", version=self.flow.num_published)
        self.running = dict.fromkeys(self.running, self.flow.num_published)

    def turn(self) -> None:
        actions = [self.start] * 3 + [self.finish] * 6 + [self.take] * 3 + [self.publish] * 2 + [self.retry]
        self.rng.choice(actions)()
        if self.rng.random() < 0.01:
            self.resume()
        self.flow.check()

    def run(self) -> None:
        for _ in range(20_000):
            if self.flow.num_published == self.num_batches:
                return
            self.turn()
        raise AssertionError(f"no end: waits for {self.flow.waits_for()}, {self.flow.num_free} free")


def random_rules(rng: random.Random) -> StalenessPolicy:
    order, stale = rng.choice(ORDERS)
    staleness = rng.choice([0, 1, 2, 4]) if stale == "wait" else rng.choice([1, 2, 4])
    return StalenessPolicy(
        groups_per_step=rng.choice([1, 2, 5]),
        staleness=staleness,
        order=order,
        stale=stale,
        refill_rounds=rng.choice([0, 0, 1, 3]),
        spare_groups=rng.choice([0, 2]) if order == "completion" and not staleness else 0,
    )


def check_batches(world: World) -> None:
    """What holds of every run, whatever its schedule was."""
    rules, trained = world.rules, Counter(n for taken in world.batches for n in taken.numbers)
    assert [taken.batch for taken in world.batches] == list(range(world.num_batches))
    assert set(trained.values()) == {1}
    for taken in world.batches:
        num_replaced = len(taken.numbers) - rules.groups_per_step
        assert 0 <= num_replaced <= rules.refill_rounds * rules.groups_per_step
        assert num_replaced <= len(taken.left_out)
        ages = [s for place, s in enumerate(taken.staleness) if place not in taken.left_out]
        assert all(age >= 0 for age in ages)
        if rules.stale != "keep":
            assert max(ages, default=0) <= rules.staleness
    assert check_log(world.lines) == []


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


def synchronous(rules: StalenessPolicy, equal: set[int]) -> tuple[list[int], set[int], int]:
    """A batch as a loop makes it that starts a round, waits for all of it, and starts the next one.

    `equal` says which prompts, numbered in the order they are asked, get equal rewards. The groups, places of
    those left out, and rounds beyond the first.
    """
    groups: list[int] = []
    left_out: set[int] = set()
    missing, num_rounds = rules.groups_per_step, 0
    while True:
        groups += range(len(groups), len(groups) + missing)
        if rules.refill_rounds:
            left_out = {place for place, group in enumerate(groups) if group in equal}
            missing = rules.groups_per_step - len(groups) + len(left_out)
        if num_rounds == rules.refill_rounds or not missing:
            return groups, left_out, num_rounds
        num_rounds += 1


@pytest.mark.parametrize("refill_rounds", range(4))
def test_at_staleness_0_a_batch_is_what_the_synchronous_loop_takes(refill_rounds):
    for seed in range(300):
        rng = random.Random(seed)
        rules = StalenessPolicy(rng.choice([1, 3, 4]), 0, refill_rounds=refill_rounds)
        flow, running, first = StalenessController(rules, num_batches=3), [], 0
        for batch in range(3):
            equal = {n for n in range(40) if rng.random() < 0.5}
            while (taken := flow.take()) is None:
                while flow.num_free:
                    running.append(flow.start("p"))
                number = running.pop(rng.randrange(len(running)))
                flow.finish(number, [batch, batch], equal=number - first in equal)
            groups, left_out, num_rounds = synchronous(rules, equal)
            assert list(taken.numbers) == [first + group for group in groups]
            assert (taken.left_out, taken.num_rounds) == (left_out, num_rounds)
            assert taken.staleness == (0,) * len(groups)
            first += len(groups)
            assert not running and not flow.num_free and not flow.waits_for()
            flow.published()


def started(rules: StalenessPolicy, count: int, **given: Any) -> StalenessController:
    """A flow in which so many groups run."""
    flow = StalenessController(rules, num_batches=given.pop("num_batches", 9), **given)
    for number in range(count):
        flow.start(f"p{number}")
    return flow


def finish(
    flow: StalenessController, *numbers: int, births: tuple[int, ...] = (0, 0), equal: bool = False
) -> None:
    for number in numbers:
        flow.finish(number, births, equal=equal)


def test_tickets_are_freed_when_the_weights_are_in_force():
    flow = started(StalenessPolicy(2, 1), 4)
    assert flow.num_free == 0
    finish(flow, 1, 2, 3)
    assert flow.take() is None and flow.waits_for() == [0]
    finish(flow, 0)
    taken = flow.take()
    assert taken is not None and (taken.numbers, taken.staleness) == ((0, 1), (0, 0))
    assert flow.num_free == 0
    flow.published()
    assert flow.num_free == 2
    # A batch may be taken while the one before is still to be published.
    second = flow.take()
    assert second is not None and (second.numbers, second.staleness) == ((2, 3), (1, 1))
    assert (flow.num_free, flow.num_taken, flow.num_published) == (2, 2, 1)


def test_nothing_starts_that_no_batch_has_a_place_for():
    flow = started(StalenessPolicy(2, 3), 4, num_batches=2)
    assert flow.num_free == 0
    finish(flow, 0, 1)
    assert flow.take() is not None
    flow.published()
    assert flow.num_free == 0
    finish(flow, 2, 3)
    last = flow.take()
    assert last is not None and last.numbers == (2, 3)
    flow.published()
    assert flow.num_free == 0 and flow.take() is None


def test_an_equal_group_is_replaced_before_its_round_has_ended():
    flow = started(StalenessPolicy(2, 0, refill_rounds=1), 2)
    finish(flow, 1, equal=True)
    assert flow.num_free == 1 and flow.start("p2") == 2
    # The one round is used up: what is equal now is a place that teaches nothing.
    finish(flow, 2, equal=True)
    assert flow.num_free == 0
    finish(flow, 0, equal=False)
    taken = flow.take()
    assert taken is not None and (taken.numbers, taken.left_out) == ((0, 1, 2), {1, 2})
    assert taken.num_rounds == 1


def overtaken(stale: str, *, births: tuple[int, ...] = (0, 0)) -> StalenessController:
    """Group 0 is still running at a staleness of 1, when groups started later are ready for batch 2."""
    flow = started(StalenessPolicy(1, 1, order="completion", stale=stale), 2)
    finish(flow, 1)
    assert flow.take() is not None
    flow.published()
    if stale == "wait":
        return flow
    finish(flow, flow.start("p2"), births=(1, 1))
    assert flow.take() is not None
    flow.published()
    finish(flow, 0, births=births)
    return flow


def test_wait_leaves_no_group_behind_that_would_be_too_old():
    flow = overtaken("wait")
    finish(flow, flow.start("p2"), births=(1, 1))
    assert flow.take() is None and flow.waits_for() == [0]
    finish(flow, 0)
    taken = flow.take()
    assert taken is not None and (taken.numbers, taken.staleness) == ((0,), (1,))


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_a_batch_that_is_too_old_is_refused_also_where_tickets_failed_to_prevent_it(order, monkeypatch):
    monkeypatch.setattr(StalenessController, "num_free", 1)
    monkeypatch.setattr(GroupQueue, "due", lambda line, batch: set())
    flow = started(StalenessPolicy(1, 1, order=order), 3)
    finish(flow, 0, 1, 2)
    for number, age in enumerate((0, 1)):
        taken = flow.take()
        assert taken is not None and (taken.numbers, taken.staleness) == ((number,), (age,))
    before = flow.state()
    with pytest.raises(TooStale) as error:
        flow.take()
    assert str(error.value) == "group 2 would be 2 publishes old in batch 2; the bound is 1"
    assert flow.state() == before


def test_drop_starts_the_prompt_again():
    flow = overtaken("drop")
    assert flow.take() is None and flow.repeats == ("p0",)
    with pytest.raises(ValueError, match="p9 cannot start: p0 starts again before it"):
        flow.start("p9")
    finish(flow, flow.start("p0"), births=(2, 2))
    assert flow.repeats == ()
    taken = flow.take()
    assert taken is not None and taken.numbers == (3,)
    assert [(d.number, d.prompt_id, d.reason) for d in taken.dropped] == [(0, "p0", "stale")]


def test_keep_trains_on_what_is_too_old():
    taken = overtaken("keep").take()
    assert taken is not None and (taken.numbers, taken.staleness, taken.withheld) == ((0,), (2,), {})


def test_withhold_leaves_out_the_trajectories_that_are_too_old():
    taken = overtaken("withhold", births=(0, 1, 2, 0)).take()
    assert taken is not None and (taken.numbers, taken.staleness) == ((0,), (1,))
    assert taken.withheld == {0: (0, 3)}
    # One trajectory has nothing to be compared with.
    flow = overtaken("withhold", births=(0, 0, 0, 2))
    assert flow.take() is None and flow.repeats == ("p0",)


def test_spare_groups_are_ended_when_the_batch_is_full():
    flow = started(StalenessPolicy(2, 0, order="completion", spare_groups=2), 4)
    assert flow.num_free == 0
    finish(flow, 3)
    assert flow.take() is None and flow.waits_for() == [0, 1, 2]
    finish(flow, 1)
    taken = flow.take()
    assert taken is not None and taken.numbers == (1, 3)
    assert [(d.number, d.reason) for d in taken.dropped] == [(0, "spare"), (2, "spare")]
    assert flow.num_free == 0 and flow.repeats == ("p0", "p2")
    flow.published()
    assert flow.num_free == 4


def test_a_flow_continues_from_its_state():
    rules, noted = StalenessPolicy(1, 1, order="completion", stale="drop"), []
    flow = overtaken("drop")
    flow.start("p0")
    state = json.loads(json.dumps(flow.state()))
    again = StalenessController(rules, num_batches=9, note=lambda kind, **facts: noted.append((kind, facts)))
    again.load_state(state)
    assert again.unfinished == {3: "p0"} and again.num_published == again.num_taken == 2
    assert noted == [("resume", {"numbers": [3], "taken": 2, "num_batches": 9})]
    for one in (flow, again):
        finish(one, 3, births=(2, 2))
    taken = again.take()
    assert taken is not None and taken == flow.take() and taken.numbers == (3,)
    # What was dropped before it was saved is told with the first batch after.
    assert [d.reason for d in taken.dropped] == ["stale"]
    with pytest.raises(ValueError, match="saved under"):
        StalenessController(StalenessPolicy(3, 1), num_batches=9).load_state(state)


def test_what_cannot_be_is_refused():
    flow = started(StalenessPolicy(1, 0), 1)
    with pytest.raises(ValueError, match="p1 cannot start: 1 places are held and none is free"):
        flow.start("p1")
    with pytest.raises(ValueError, match="publish 1 has no batch; 0 are taken"):
        flow.published()
    with pytest.raises(ValueError, match="without a trajectory"):
        flow.finish(0, [], equal=False)
    with pytest.raises(ValueError, match="an engine missed a load"):
        flow.finish(0, [0, 1], equal=False)
    finish(flow, 0)
    for number, why in ((0, "finished already"), (1, "never started")):
        with pytest.raises(ValueError, match=f"group {number} is not running: .*{why}"):
            finish(flow, number)
    assert flow.take() is not None
    flow.published()
    number = flow.start("p1")
    with pytest.raises(ValueError, match=r"started after 1 publishes.*publishes \[0, 1\]"):
        flow.finish(number, [1, 0], equal=False)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"groups_per_step": 0}, "groups_per_step is 0; it must be at least 1"),
        ({"staleness": -1}, "staleness is -1; it must be at least 0"),
        ({"stale": "drop"}, "stale drop needs completion order"),
        ({"stale": "keep", "order": "completion", "staleness": 0}, "stale keep needs completion order"),
        ({"spare_groups": 1, "staleness": 0}, "spare_groups is 1; it needs completion order"),
        ({"spare_groups": 1, "order": "completion"}, "spare_groups is 1; it needs completion order"),
    ],
)
def test_rules_without_effect_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        StalenessPolicy(**{"groups_per_step": 2, "staleness": 1, **given})


def test_nothing_is_replaced_or_spare_unless_asked_for():
    rules = StalenessPolicy(4, 0)
    assert (rules.order, rules.stale, rules.refill_rounds, rules.spare_groups) == ("submission", "wait", 0, 0)
