"""Staleness control: admission, batch selection and dropping of rollout groups.

No clock, no threads, no tensors: real engines or a simulation may drive a `StalenessController`. `GroupQueue`
is the queue of groups that have started and are not in a batch yet, in order.

Letters: `g` groups_per_step, `eta` the staleness bound, `p` weight updates so far, `t` batches taken so far.
The step counts weight updates, one for each batch: batch `t` trains the weights of step `t`, so a token that
the weights of step `s` sampled has staleness `t - s` there. The policy version counts optimizer steps; it
stays the same if all optimizer steps of a batch are skipped (see `engine_pool`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import islice
from typing import Any, Literal, Protocol


@dataclass(slots=True)
class QueuedGroup:
    """A queued group.

    Attributes:
        prompt_id: of its prompt.
        start_step: step in force when it started; none of its tokens can be older.
        oldest_steps: step of the oldest token of each trajectory; None until the group is finished.
        zero_std: all its rewards are equal, and such groups are to be replaced.
    """

    prompt_id: str
    start_step: int
    oldest_steps: tuple[int, ...] | None = None
    zero_std: bool = False


class GroupQueue:
    """The group queue, and the rule that selects a batch from it.

    **Submission order**: with `E(i)` of the first `i` groups known to be equal, `end = g`, then `r` times
    `end = g + E(end)`, where `r` is `dynamic_sampling_rounds`. The next batch is the first `end` groups, once
    they are finished. Results that arrive later can only raise `end`.

    **Completion order**: up to `r g` equal groups are replaced, and `g` others fill the places
    in the order in which they finished, equal ones last. With `none_late`, groups that would be too old for
    later batches come first: for each batch `d >= t`, at most `g (d + 1 - t)` groups of the queue must be
    trained on by `d`, and the next batch is complete only if it leaves that true for `t + 1`. The sets grow
    with `d`, so a batch has room for the groups that each of them requires.

    Args:
        size: g.
        staleness: eta.
        dynamic_sampling_rounds: how often equal groups are replaced.
        in_order: submission order instead of completion order.
        none_late: train on every group before it is too old.
    """

    def __init__(
        self, *, size: int, staleness: int, dynamic_sampling_rounds: int, in_order: bool, none_late: bool
    ) -> None:
        self._size, self._staleness, self._dynamic_sampling_rounds = size, staleness, dynamic_sampling_rounds
        self._in_order, self._none_late = in_order, none_late
        # By group number, ascending.
        self.groups: dict[int, QueuedGroup] = {}
        # Numbers of the finished groups, in completion order.
        self.arrived: list[int] = []
        # For the next batch, as far as known.
        self.num_replaced = self.num_rounds = 0

    @property
    def num_places(self) -> int:
        """Number of places that the queue holds."""
        return len(self.groups) - self.num_replaced

    def add(self, number: int, group: QueuedGroup) -> None:
        """Add a started group; its number is above all earlier ones."""
        self.groups[number] = group

    def finish(self, number: int, oldest_steps: Iterable[int], *, zero_std: bool) -> None:
        """Mark a group as generated and scored."""
        group = self.groups[number]
        group.oldest_steps, group.zero_std = (
            tuple(oldest_steps),
            zero_std and self._dynamic_sampling_rounds > 0,
        )
        self.arrived.append(number)
        if group.zero_std:
            self._count()

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove groups that are taken or dropped."""
        for number in numbers:
            if self.groups.pop(number).oldest_steps is not None:
                self.arrived.remove(number)
        self._count()

    def choose(self, batch: int) -> tuple[list[int], list[int]]:
        """Select the next batch.

        Returns:
            its groups, or none while it is incomplete; and the unfinished groups that it waits for. If both
            are empty, more groups must start.
        """
        size, groups = self._size, self.groups
        if self._in_order:
            first = list(islice(groups, size + self.num_replaced))
            missing = [number for number in first if groups[number].oldest_steps is None]
            return ([] if missing or len(first) < size + self.num_replaced else first), missing
        running = [number for number, group in groups.items() if group.oldest_steps is None]
        if len(self.arrived) < size + self.num_replaced:
            return [], running
        zero_std = [number for number in self.arrived if groups[number].zero_std]
        ready = [number for number in self.arrived if not groups[number].zero_std]
        chosen: list[int] = []
        for later in range(batch, batch + self._staleness):
            due = self.due(later)
            needed = len(due) - size * (later - batch)
            early = [number for number in ready if number in due and number not in chosen]
            chosen += early[: max(0, needed - len(chosen))]
            if len(chosen) < needed:
                return [], [number for number in running if number in due]
        others = [number for number in ready if number not in chosen]
        chosen = (chosen + others + zero_std[self.num_replaced :])[:size]
        return chosen + zero_std[: self.num_replaced], []

    def due(self, batch: int) -> set[int]:
        """Return the groups that must be trained on by a batch, because the next one may be too late."""
        if not self._none_late:
            return set()
        latest, groups = batch - self._staleness, self.groups.items()
        return {number for number, group in groups if group.start_step <= latest and not group.zero_std}

    def check(self, batch: int, num_spare: int) -> None:
        """Verify that no group can become too old, if the rule guarantees it, with `batch` the next.

        Raises:
            AssertionError: it does not hold; the message names the group or batch.
        """
        finished = [number for number, group in self.groups.items() if group.oldest_steps is not None]
        if sorted(self.arrived) != finished:
            raise AssertionError(f"groups {self.arrived} arrived, but {finished} are finished")
        if self._in_order:
            for index, (number, group) in enumerate(self.groups.items()):
                latest = batch + max(0, 1 + (index - self._size - self.num_replaced) // self._size)
                if latest - group.start_step > self._staleness:
                    raise AssertionError(f"group {number} would wait until batch {latest}")
        for later in range(batch, batch + self._staleness + 1):
            num_due = len(self.due(later)) - num_spare
            if num_due > self._size * (later + 1 - batch):
                raise AssertionError(f"{num_due} groups must be trained on by batch {later}")

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        groups = [[number, *astuple(group)] for number, group in self.groups.items()]
        return {"groups": groups, "arrived": list(self.arrived)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.arrived = list(state["arrived"])
        self.groups = {
            number: QueuedGroup(prompt_id, start_step, oldest_steps and tuple(oldest_steps), zero_std)
            for number, prompt_id, start_step, oldest_steps, zero_std in state["groups"]
        }
        self._count()

    def _count(self) -> None:
        """Update the number of groups that are replaced in the next batch."""
        if not self._in_order:
            num_zero_std = sum(self.groups[number].zero_std for number in self.arrived)
            self.num_replaced = min(num_zero_std, self._dynamic_sampling_rounds * self._size)
            self.num_rounds = -(-self.num_replaced // self._size)
            return
        self.num_replaced = self.num_rounds = 0
        for _ in range(self._dynamic_sampling_rounds):
            first = islice(self.groups.values(), self._size + self.num_replaced)
            num_zero_std = sum(group.zero_std for group in first)
            if num_zero_std == self.num_replaced:
                break
            self.num_replaced, self.num_rounds = num_zero_std, self.num_rounds + 1


class EventCallback(Protocol):
    """Callback for each decision, with the event kind and fields of `log.EventLog.add`."""

    def __call__(self, kind: str, /, **facts: Any) -> None:
        """Record one decision."""
        ...


def discard_event(kind: str, /, **facts: Any) -> None:
    """Discard a decision."""


class TooStale(RuntimeError):
    """A batch would train on a group that is older than the bound."""


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """The staleness policy.

    Attributes:
        groups_per_step: places of a batch.
        staleness: maximum number of weight updates between the oldest trained token of a group and the
            weights it trains; 0 is synchronous.
        order: a batch takes the groups that started first (submission) or that finished first (completion).
        stale: with completion order, how to handle a group that would be too old in the next batch. `wait`:
            no batch leaves it behind. `drop`: it is dropped and its prompt starts again. `keep`: it is
            trained on, however old. `withhold`: its too old trajectories are not trained on; it is dropped
            if fewer than two remain.
        dynamic_sampling_rounds: how often the groups of a batch whose rewards are all equal are replaced.
        oversample_groups: groups started beyond the places of a batch; those that are unfinished when it is
            full are dropped, and their prompts start again.

    Raises:
        ValueError: a number is out of range, or an option has no effect with the others.
    """

    groups_per_step: int
    staleness: int
    order: Literal["submission", "completion"] = "submission"
    stale: Literal["wait", "drop", "keep", "withhold"] = "wait"
    dynamic_sampling_rounds: int = 0
    oversample_groups: int = 0

    def __post_init__(self) -> None:
        """Validate the options."""
        for name in ("groups_per_step", "staleness", "dynamic_sampling_rounds", "oversample_groups"):
            least = int(name == "groups_per_step")
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.stale != "wait" and (self.order == "submission" or not self.staleness):
            raise ValueError(
                f"stale {self.stale} needs completion order and a staleness of 1 or more; elsewhere no group "
                "is ever too old"
            )
        if self.oversample_groups and (self.order == "submission" or self.staleness):
            raise ValueError(
                f"oversample_groups is {self.oversample_groups}; it needs completion order and staleness 0 "
                "(with more, slow groups go on while others are trained on)"
            )


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that is not trained on; its prompt starts again under another number."""

    number: int
    prompt_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch.

    Attributes:
        batch: its number, from 0; equals the step of the weights that it trains.
        numbers: its group numbers, ascending.
        staleness: of each group: weight updates since its oldest token that is trained on.
        left_out: indices into `numbers` of groups that are not trained on, because all their rewards are
            equal; empty without refills.
        withheld: for each group number, indices of its trajectories that are too old to be trained on.
        num_rounds: times that equal groups were replaced.
        dropped: groups dropped since the batch before, including this `take`; abort the running ones.
    """

    batch: int
    numbers: tuple[int, ...]
    staleness: tuple[int, ...]
    left_out: frozenset[int]
    withheld: dict[int, tuple[int, ...]]
    num_rounds: int
    dropped: tuple[Dropped, ...]


class StalenessController:
    """The staleness controller: tracks every group from its start to its batch or drop.

    **Tickets.** A group starts only while fewer than `(eta + 1) g` places are held. The queue of groups that
    no batch has taken holds places (`GroupQueue`; a replaced group holds none), and so does each batch that
    is taken and whose weight update is not in force yet: `g`.

    **In submission order the staleness is at most eta.** Let a group start after `p` weight updates, when `t`
    batches are taken; let `n` be the length of the queue with it and `end` the groups of batch `t` as far as
    known. By the ticket `n - (end - g) + g (t - p) <= (eta + 1) g`. Were it trained in batch `t + k` with
    `k >= 1`, the queue before it would fill batch `t`, at least `end` groups, and `k - 1` more, at least `g`
    each: `n - 1 >= end + g (k - 1)`. The sum is `g (t + k - p) <= (eta + 1) g - 1`: its staleness is at most
    eta. With `k = 0` it holds a place itself: `1 + g (t - p) <= (eta + 1) g` gives the same bound. Later
    refills only raise `end`, and a group that is regenerated on another engine is younger.

    **So it is in completion order with `wait`.** At most `g (d + 1 - t)` groups of the queue must be trained
    on by batch `d`, for every `d >= t`. A batch is complete only if it keeps that (`GroupQueue`). A start
    after `p` weight updates keeps it too: it counts from `d = p + eta` on, and by its ticket the whole queue
    then holds at most `(eta + 1) g - g (t - p) <= g (d + 1 - t)`. With `d = t`: batch `t` has room for all
    due groups.
    """

    def __init__(
        self, rules: StalenessPolicy, *, num_batches: int, log_event: EventCallback = discard_event
    ) -> None:
        """Create the controller without groups.

        Args:
            rules: the staleness policy.
            num_batches: of the whole run; no group starts without a place in one of them.
            log_event: receives the events `start`, `finish`, `drop`, `take`, `weights_updated` and `resume`,
                in order.
        """
        self._rules, self._num_batches, self._log_event = rules, num_batches, log_event
        self._num_updates = self._num_taken = self._num_started = self._num_left = 0
        self._repeats: deque[str] = deque()
        self._dropped: list[Dropped] = []
        self._queue = GroupQueue(
            size=rules.groups_per_step,
            staleness=rules.staleness,
            dynamic_sampling_rounds=rules.dynamic_sampling_rounds,
            in_order=rules.order == "submission",
            none_late=rules.order == "completion" and rules.stale == "wait",
        )

    @property
    def num_updates(self) -> int:
        """Weight updates in force: tokens sampled from now on have at least this step."""
        return self._num_updates

    @property
    def num_taken(self) -> int:
        """Batches taken so far; the next one trains the weights of this step."""
        return self._num_taken

    @property
    def num_free(self) -> int:
        """Number of groups that may start now."""
        rules = self._rules
        tickets = rules.staleness + 1 - (self._num_taken - self._num_updates)
        batches = min(tickets, self._num_batches - self._num_taken)
        if not batches:
            return 0
        return max(0, batches * rules.groups_per_step + rules.oversample_groups - self._queue.num_places)

    @property
    def repeats(self) -> tuple[str, ...]:
        """Prompts of dropped groups, which start again before new ones, in this order."""
        return tuple(self._repeats)

    @property
    def unfinished(self) -> dict[int, str]:
        """The prompt of each started, unfinished group; after `load_state`, generate them anew."""
        groups = self._queue.groups.items()
        return {number: group.prompt_id for number, group in groups if group.oldest_steps is None}

    def start(self, prompt_id: str) -> int:
        """Take a ticket for a new group.

        Args:
            prompt_id: the first of `repeats`, unless that is empty.

        Returns:
            the group number, counted from 0 in submission order.

        Raises:
            ValueError: no ticket is free, or another prompt must start first.
        """
        if not self.num_free:
            held = self._queue.num_places
            raise ValueError(f"prompt {prompt_id} cannot start: {held} places are held and none is free")
        if self._repeats and self._repeats[0] != prompt_id:
            raise ValueError(f"prompt {prompt_id} cannot start: {self._repeats[0]} starts again before it")
        if self._repeats:
            self._repeats.popleft()
        number = self._num_started
        self._num_started += 1
        self._queue.add(number, QueuedGroup(prompt_id, self._num_updates))
        self._log_event("start", number=number, prompt=prompt_id, step=self._num_updates)
        return number

    def start_step(self, number: int) -> int:
        """Return the step of the weights that were in force when an unfinished group started."""
        return self._unfinished(number).start_step

    def finish(self, number: int, oldest_steps: Sequence[int], *, zero_std: bool) -> None:
        """Mark a group as finished: all its trajectories are generated and scored.

        Args:
            number: of the group.
            oldest_steps: step of the oldest token of each trajectory.
            zero_std: whether all its rewards are equal, so that its advantages are zero.

        Raises:
            ValueError: no such group is unfinished, or its tokens have a step that no engine should have.
        """
        group = self._unfinished(number)
        if not oldest_steps:
            raise ValueError(f"group {number} finished without a trajectory")
        if min(oldest_steps) < group.start_step or max(oldest_steps) > self._num_taken:
            raise ValueError(
                f"group {number} started at step {group.start_step}, and {self._num_taken} batches are "
                f"taken, but its tokens are of steps {sorted(set(oldest_steps))}; an engine missed a weight "
                "update, or its tokens carry wrong versions"
            )
        self._queue.finish(number, oldest_steps, zero_std=zero_std)
        self._log_event("finish", number=number, oldest_steps=list(oldest_steps), zero_std=zero_std)
        self._drop_stale()

    def take(self) -> TakenBatch | None:
        """Take the next batch; None while it is incomplete, and after the last one.

        Raises:
            TooStale: a group exceeds the staleness bound; this indicates a bug.
        """
        numbers, _ = self._queue.choose(self._num_taken)
        if not numbers or self._num_taken == self._num_batches:
            return None
        taken = self._next_batch(sorted(numbers))
        self._check_bound(taken)
        self._queue.remove(taken.numbers)
        self._num_taken += 1
        self._num_left += len(taken.numbers)
        self._log_event(
            "take",
            batch=taken.batch,
            numbers=list(taken.numbers),
            staleness=list(taken.staleness),
            left_out=sorted(taken.left_out),
            withheld={str(number): list(places) for number, places in taken.withheld.items()},
        )
        if self._rules.oversample_groups:
            self._drop(list(self._queue.groups), "spare")
        self._drop_stale()
        dropped, self._dropped = tuple(self._dropped), []
        return replace(taken, dropped=dropped)

    def weights_updated(self) -> None:
        """Record that the weight update of the oldest pending batch is in force on all engines.

        The next batch may be taken, and trained on, before that.

        Raises:
            ValueError: no taken batch is pending.
        """
        if self._num_updates == self._num_taken:
            raise ValueError(
                f"weight update {self._num_updates + 1} has no batch; {self._num_taken} are taken"
            )
        self._num_updates += 1
        self._log_event("weights_updated", step=self._num_updates)

    def waits_for(self) -> list[int]:
        """Return the unfinished groups that the next batch requires, for the watchdog."""
        return self._queue.choose(self._num_taken)[1]

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON. Save it with weights that were trained on every batch taken."""
        return {
            "rules": asdict(self._rules),
            "num_taken": self._num_taken,
            "num_started": self._num_started,
            "num_left": self._num_left,
            "queue": self._queue.state(),
            "repeats": list(self._repeats),
            "dropped": [astuple(dropped) for dropped in self._dropped],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state, with the saved weights in force on all engines and no pending weight update.

        Raises:
            ValueError: it was saved under another policy.
        """
        if state["rules"] != asdict(self._rules):
            raise ValueError(
                f"the state was saved under {state['rules']}; the rules are {asdict(self._rules)}"
            )
        self._num_taken = self._num_updates = state["num_taken"]
        self._num_started, self._num_left = state["num_started"], state["num_left"]
        self._queue.load_state(state["queue"])
        self._repeats = deque(state["repeats"])
        self._dropped = [Dropped(*dropped) for dropped in state["dropped"]]
        numbers = list(self._queue.groups)
        self._log_event("resume", numbers=numbers, taken=self._num_taken, num_batches=self._num_batches)

    def check(self) -> None:
        """Verify that no group is lost, that none can become too old, and that the run can proceed.

        Raises:
            AssertionError: an invariant does not hold; the message has the numbers.
        """
        rules, taken, queue = self._rules, self._num_taken, self._queue
        num_known = self._num_left + len(queue.groups)
        if num_known != self._num_started:
            raise AssertionError(f"{self._num_started} groups started, {num_known} are known")
        if not self._num_updates <= taken <= self._num_batches:
            raise AssertionError(
                f"{taken} batches of {self._num_batches}, {self._num_updates} weight updates"
            )
        batches = min(rules.staleness + 1 - (taken - self._num_updates), self._num_batches - taken)
        if batches < 0 or queue.num_places > batches * rules.groups_per_step + rules.oversample_groups:
            raise AssertionError(f"{queue.num_places} places are held, for {batches} batches")
        queue.check(taken, rules.oversample_groups)
        numbers, missing = queue.choose(taken)
        if batches and not numbers and not missing and not self.num_free:
            raise AssertionError(f"batch {taken} is not complete and nothing may start")

    def _unfinished(self, number: int) -> QueuedGroup:
        """Return an unfinished group of the queue; raise ValueError if it is not one."""
        group = self._queue.groups.get(number)
        if group is None or group.oldest_steps is not None:
            why = "it is finished already" if group else "it never started, was taken or was dropped"
            raise ValueError(f"group {number} is not running: {why}")
        return group

    def _next_batch(self, numbers: Sequence[int]) -> TakenBatch:
        """Build the next batch from these groups."""
        groups = [self._queue.groups[number] for number in numbers]
        left_out = frozenset(place for place, group in enumerate(groups) if group.zero_std)
        withheld, staleness = {}, []
        for place, (number, group) in enumerate(zip(numbers, groups, strict=True)):
            oldest_steps, old = group.oldest_steps or (), self._too_old(group)
            if old and place not in left_out and self._rules.stale == "withhold":
                withheld[number] = old
                oldest_steps = tuple(step for i, step in enumerate(oldest_steps) if i not in old)
            staleness.append(self._num_taken - min(oldest_steps))
        return TakenBatch(
            self._num_taken, tuple(numbers), tuple(staleness), left_out, withheld, self._queue.num_rounds, ()
        )

    def _check_bound(self, taken: TakenBatch) -> None:
        """Check the bound again on the final batch, independently of the earlier checks."""
        rules = self._rules
        for place, (number, age) in enumerate(zip(taken.numbers, taken.staleness, strict=True)):
            if age > rules.staleness and rules.stale != "keep" and place not in taken.left_out:
                raise TooStale(
                    f"group {number} would have staleness {age} in batch {taken.batch}; the bound is "
                    f"{rules.staleness}"
                )

    def _too_old(self, group: QueuedGroup) -> tuple[int, ...]:
        """Return the indices of a group's trajectories that are too old for the next batch."""
        oldest = self._num_taken - self._rules.staleness
        return tuple(place for place, step in enumerate(group.oldest_steps or ()) if step < oldest)

    def _drop_stale(self) -> None:
        """Drop finished groups that are too old for the next batch, if the policy requires it."""
        if self._rules.stale not in ("drop", "withhold"):
            return
        stale = []
        for number in self._queue.arrived:
            group = self._queue.groups[number]
            num_old = len(self._too_old(group))
            enough = self._rules.stale == "withhold" and len(group.oldest_steps or ()) - num_old >= 2
            if num_old and not enough and not group.zero_std:
                stale.append(number)
        self._drop(stale, "stale")

    def _drop(self, numbers: Sequence[int], reason: str) -> None:
        for number in numbers:
            prompt_id = self._queue.groups[number].prompt_id
            self._dropped.append(Dropped(number, prompt_id, reason))
            self._repeats.append(prompt_id)
            self._log_event("drop", number=number, reason=reason)
        self._num_left += len(numbers)
        self._queue.remove(numbers)
