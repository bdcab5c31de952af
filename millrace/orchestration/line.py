"""Groups that have started and that no batch has taken, in order, and which of them make the next batch.

Letters: `g` places of a batch, `eta` the staleness bound, `t` the next batch. A group holds a place unless it
is *replaced*: all its rewards are equal, and another group is started for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any


@dataclass(slots=True)
class Waiting:
    """A group of the line.

    Attributes:
        prompt_id: what it answers.
        started: publishes when it started; none of its tokens can be older.
        births: publishes before the oldest token of each of its trajectories; None until it is finished.
        equal: all its rewards are, and equal groups are to be replaced.
    """

    prompt_id: str
    started: int
    births: tuple[int, ...] | None = None
    equal: bool = False


class Line:
    """The groups, and the rule that makes a batch of them.

    **In order** of their starts: with `E(i)` of the first `i` groups known to be equal, `end = g`, then
    `refill_rounds` times `end = g + E(end)`. The next batch is the first `end` groups, once they are
    finished. What is learnt later can only raise `end`.

    **As they finish**: up to `refill_rounds * g` equal groups are replaced, and `g` others fill the places in
    the order in which they finished, equal ones last. With `none_late` those that would be too old for later
    batches come first: for each batch `d >= t`, at most `g (d + 1 - t)` groups of the line must be trained on
    by `d`, and the next batch is complete only if it leaves that true for `t + 1`. The sets grow with `d`,
    so a batch has room for what each of them asks for.

    Args:
        size: g.
        staleness: eta.
        refill_rounds: how often equal groups are replaced.
        in_order: batches are made in the order of starts.
        none_late: no group may be left behind until it is too old.
    """

    def __init__(
        self, *, size: int, staleness: int, refill_rounds: int, in_order: bool, none_late: bool
    ) -> None:
        self._size, self._staleness, self._refill_rounds = size, staleness, refill_rounds
        self._in_order, self._none_late = in_order, none_late
        # By number, ascending.
        self.groups: dict[int, Waiting] = {}
        # Numbers of those that are finished, the earliest first.
        self.arrived: list[int] = []
        # Of the next batch, as far as is known.
        self.num_replaced = self.num_rounds = 0

    @property
    def num_places(self) -> int:
        """Places that the line holds."""
        return len(self.groups) - self.num_replaced

    def add(self, number: int, group: Waiting) -> None:
        """A group starts, with a number above those before."""
        self.groups[number] = group

    def finish(self, number: int, births: Iterable[int], *, equal: bool) -> None:
        """A group has been drawn and scored."""
        group = self.groups[number]
        group.births, group.equal = tuple(births), equal and self._refill_rounds > 0
        self.arrived.append(number)
        if group.equal:
            self._count()

    def remove(self, numbers: Iterable[int]) -> None:
        """Groups are taken or dropped."""
        for number in numbers:
            if self.groups.pop(number).births is not None:
                self.arrived.remove(number)
        self._count()

    def choose(self, batch: int) -> tuple[list[int], list[int]]:
        """The next batch: its groups, or none while it is not complete; and the unfinished ones it waits for.

        It may be incomplete and wait for nothing that has started; then more groups must start.
        """
        size, groups = self._size, self.groups
        if self._in_order:
            first = list(islice(groups, size + self.num_replaced))
            missing = [number for number in first if groups[number].births is None]
            return ([] if missing or len(first) < size + self.num_replaced else first), missing
        running = [number for number, group in groups.items() if group.births is None]
        if len(self.arrived) < size + self.num_replaced:
            return [], running
        equal = [number for number in self.arrived if groups[number].equal]
        ready = [number for number in self.arrived if not groups[number].equal]
        chosen: list[int] = []
        for later in range(batch, batch + self._staleness):
            due = self.due(later)
            needed = len(due) - size * (later - batch)
            early = [number for number in ready if number in due and number not in chosen]
            chosen += early[: max(0, needed - len(chosen))]
            if len(chosen) < needed:
                return [], [number for number in running if number in due]
        others = [number for number in ready if number not in chosen]
        chosen = (chosen + others + equal[self.num_replaced :])[:size]
        return chosen + equal[: self.num_replaced], []

    def due(self, batch: int) -> set[int]:
        """Groups that must be trained on by a batch, because they might be too old for the one after it."""
        if not self._none_late:
            return set()
        latest, groups = batch - self._staleness, self.groups.items()
        return {number for number, group in groups if group.started <= latest and not group.equal}

    def check(self, batch: int, num_spare: int) -> None:
        """Prove that no group can become too old, where the rule says so, with `batch` the next.

        Raises:
            AssertionError: which group or batch it does not hold for.
        """
        finished = [number for number, group in self.groups.items() if group.births is not None]
        if sorted(self.arrived) != finished:
            raise AssertionError(f"groups {self.arrived} arrived, but {finished} are finished")
        if self._in_order:
            for index, (number, group) in enumerate(self.groups.items()):
                latest = batch + max(0, 1 + (index - self._size - self.num_replaced) // self._size)
                if latest - group.started > self._staleness:
                    raise AssertionError(f"group {number} would wait until batch {latest}")
        for later in range(batch, batch + self._staleness + 1):
            num_due = len(self.due(later)) - num_spare
            if num_due > self._size * (later + 1 - batch):
                raise AssertionError(f"{num_due} groups must be trained on by batch {later}")

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        groups = [[number, *astuple(group)] for number, group in self.groups.items()]
        return {"groups": groups, "arrived": list(self.arrived)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self.arrived = list(state["arrived"])
        self.groups = {
            number: Waiting(prompt_id, started, births and tuple(births), equal)
            for number, prompt_id, started, births, equal in state["groups"]
        }
        self._count()

    def _count(self) -> None:
        """Count the groups that are replaced in the next batch."""
        if not self._in_order:
            num_equal = sum(self.groups[number].equal for number in self.arrived)
            self.num_replaced = min(num_equal, self._refill_rounds * self._size)
            self.num_rounds = -(-self.num_replaced // self._size)
            return
        self.num_replaced = self.num_rounds = 0
        for _ in range(self._refill_rounds):
            first = islice(self.groups.values(), self._size + self.num_replaced)
            num_equal = sum(group.equal for group in first)
            if num_equal == self.num_replaced:
                break
            self.num_replaced, self.num_rounds = num_equal, self.num_rounds + 1
