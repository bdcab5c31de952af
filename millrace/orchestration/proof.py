"""What is known after each line of an event log, where no line may contradict those before it. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FACTS = {
    "begin": ("rules", "num_batches"),
    "threads": ("ranks",),
    "start": ("number", "prompt", "published"),
    "dispatch": ("number", "samples", "turn", "engine"),
    "part": ("number", "sample", "turn", "engine"),
    "arrive": ("number", "sample", "turn", "engine", "oldest", "newest"),
    "judge": ("call", "numbers"),
    "finish": ("number", "births", "equal"),
    "drop": ("number", "reason"),
    "take": ("batch", "numbers", "staleness", "left_out", "withheld"),
    "publish": ("version",),
    "load": ("engine", "version"),
    "lost": ("engine", "reason"),
    "joined": ("engine",),
    "want": ("engines", "leaving", "reason"),
    "ignore": ("reason",),
    "resume": ("numbers", "taken", "num_batches"),
    "hold": (),
    "keep": ("number", "turns", "tokens"),
    "save": ("name",),
    "heard": ("events",),
    "send": ("version",),
    "took": ("engine", "orders"),
    "asked": ("engine", "draws"),
}
# They say nothing that another event could contradict.
UNPROVED = ("threads", "ignore", "hold", "save", "heard", "asked")


class LogError(ValueError):
    """A log that no sound run can have written."""


def read(events: Iterable[Mapping[str, Any]]) -> _Reader:
    """What is known at the end.

    Args:
        events: of a log, in order.

    Raises:
        LogError: the first event that contradicts those before it, and why.
    """
    reader = _Reader()
    for line, event in enumerate(events, start=1):
        kind = event.get("kind", "without a kind")
        try:
            missing = [name for name in FACTS.get(kind, ("a kind that is known",)) if name not in event]
            _demand(not missing, f"it lacks {missing}")
            _demand((line == 1) == (kind == "begin"), "a log has one event begin, the first")
            if kind not in UNPROVED:
                getattr(reader, kind)(event)
        except LogError as error:
            raise LogError(f"line {line} of the event log, {kind}: {error}") from None
    return reader


class _Reader:
    """What is known after each event. A method for each kind that says something to be proved."""

    def __init__(self) -> None:
        self.rules: Mapping[str, Any] = {}
        self.num_batches = self.published = self.sent = self.taken = self.num_started = 0
        # Publishes when each group started that is neither taken nor dropped.
        self.line: dict[int, int] = {}
        self.prompts: dict[int, str] = {}
        # The oldest token of each of their trajectories: as they arrive, and once they are finished.
        self.arrived: dict[int, dict[tuple[int, int], int]] = {}
        self.finished: dict[int, list[int]] = {}
        # What had arrived of unfinished groups before a resume.
        self.saved: dict[int, dict[tuple[int, int], int]] = {}
        self.gone: dict[int, str] = {}
        self.repeats: deque[str] = deque()
        # Publishes whose weights each engine draws with.
        self.held: dict[str, int] = {}
        # Engines that are there, and of those the ones that get nothing to draw any more.
        self.there: set[str] = set()
        self.leaving: set[str] = set()
        # The turn before which each engine took an order up last.
        self.turns: dict[str, int] = {}

    def begin(self, event: Mapping[str, Any]) -> None:
        self.rules, self.num_batches = event["rules"], event["num_batches"]

    def start(self, event: Mapping[str, Any]) -> None:
        number = event["number"]
        _demand(number == self.num_started, f"group {number} starts where {self.num_started} is next")
        _demand(event["published"] == self.published, f"there were {self.published} publishes")
        if self.repeats:
            first = self.repeats.popleft()
            _demand(event["prompt"] == first, f"prompt {first} had to start again first")
        self.num_started += 1
        self.line[number], self.prompts[number] = self.published, event["prompt"]

    def dispatch(self, event: Mapping[str, Any]) -> None:
        _demand(event["engine"] not in self.leaving, f"engine {event['engine']} was to leave")
        self._drawn_by(event, event["samples"])

    def part(self, event: Mapping[str, Any]) -> None:
        self._drawn_by(event, [event["sample"]])

    def _drawn_by(self, event: Mapping[str, Any], samples: Sequence[int]) -> None:
        """An engine that has weights draws a turn of samples, or has drawn a part, that has not arrived."""
        number, engine = event["number"], event["engine"]
        self._unfinished(number)
        _demand(engine in self.held, f"engine {engine} has not loaded any weights")
        seen = self.arrived.get(number, {})
        over = [sample for sample in samples if (sample, event["turn"]) in seen]
        _demand(not over, f"turn {event['turn']} of samples {over} of group {number} arrived before")

    def judge(self, event: Mapping[str, Any]) -> None:
        for number in event["numbers"]:
            self._unfinished(number)

    def arrive(self, event: Mapping[str, Any]) -> None:
        number, engine = event["number"], event["engine"]
        self._unfinished(number)
        _demand(engine in self.held, f"engine {engine} has not loaded any weights")
        oldest, newest = event["oldest"], event["newest"]
        _demand(
            self.line[number] <= oldest <= newest <= self.held[engine],
            f"group {number} started after {self.line[number]} publishes and engine {engine} has the weights "
            f"of {self.held[engine]}, but the tokens are of {oldest} to {newest}",
        )
        place, seen = (event["sample"], event["turn"]), self.arrived.setdefault(number, {})
        _demand(place not in seen, f"sample {place[0]}, turn {place[1]} of group {number} arrived before")
        seen[place] = oldest

    def finish(self, event: Mapping[str, Any]) -> None:
        number, births = event["number"], event["births"]
        self._unfinished(number)
        _demand(
            bool(births) and self.line[number] <= min(births) and max(births) <= self.taken,
            f"group {number} has births {births}, but started after {self.line[number]} publishes, and "
            f"{self.taken} batches were taken",
        )
        samples: dict[int, int] = {}
        for (sample, _), oldest in self.arrived.pop(number, {}).items():
            samples[sample] = min(oldest, samples.get(sample, oldest))
        _demand(
            births == [samples.get(place) for place in range(len(births))],
            f"group {number} has births {births}, but of its samples {samples} arrived",
        )
        self.finished[number] = births

    def drop(self, event: Mapping[str, Any]) -> None:
        number = event["number"]
        self._known(number)
        _demand(bool(event["reason"]), f"group {number} is dropped without a reason")
        self.repeats.append(self.prompts[number])
        self._leave(number, "dropped")

    def take(self, event: Mapping[str, Any]) -> None:
        batch, numbers = event["batch"], event["numbers"]
        _demand(
            batch == self.taken < self.num_batches, f"{self.taken} of {self.num_batches} batches were taken"
        )
        _demand(numbers == sorted(set(numbers)), f"the groups {numbers} are not in order")
        for number in numbers:
            self._known(number)
            _demand(number in self.finished, f"group {number} is not finished")
        self._places(event)
        self._ages(event)
        for number in numbers:
            self._leave(number, f"trained on in batch {batch}")
        overtaken = [number for number in self.line if numbers and number < numbers[-1]]
        in_order = self.rules["order"] == "submission"
        _demand(not (in_order and overtaken), f"groups {overtaken} started before {numbers[-1:]}")
        self.taken += 1

    def _places(self, event: Mapping[str, Any]) -> None:
        """A batch has as many groups as its places and the replaced ones."""
        numbers, left_out, size = event["numbers"], set(event["left_out"]), self.rules["groups_per_step"]
        most = min(self.rules["refill_rounds"] * size, len(left_out))
        _demand(
            left_out <= set(range(len(numbers))), f"left_out {sorted(left_out)} has no place in {numbers}"
        )
        _demand(
            size <= len(numbers) <= size + most,
            f"a batch of {size} with at most {most} replaced has {len(numbers)} groups",
        )

    def _ages(self, event: Mapping[str, Any]) -> None:
        """Each group is as old as its oldest trained token, and no older than the rules allow."""
        batch, withheld = event["batch"], event["withheld"]
        _demand(len(event["staleness"]) == len(event["numbers"]), "each group has one staleness")
        _demand(not withheld or self.rules["stale"] == "withhold", "the rules let nothing be withheld")
        for place, (number, age) in enumerate(zip(event["numbers"], event["staleness"], strict=True)):
            out = set(withheld.get(str(number), ()))
            births = [birth for i, birth in enumerate(self.finished[number]) if i not in out]
            _demand(not out or len(births) >= 2, f"group {number} has {len(births)} trajectories left")
            _demand(
                age == batch - min(births), f"group {number} has births {births} and is said to be {age} old"
            )
            bound = self.rules["staleness"] if self.rules["stale"] != "keep" else age
            _demand(
                age <= bound or place in event["left_out"], f"group {number} is {age} old, more than {bound}"
            )

    def publish(self, event: Mapping[str, Any]) -> None:
        version = event["version"]
        _demand(version == self.published + 1, f"there were {self.published} publishes")
        _demand(version <= self.taken, f"only {self.taken} batches were taken")
        behind = [f"{engine} has {held}" for engine, held in self.held.items() if held < version]
        _demand(not behind, f"not every engine has loaded it: {', '.join(behind)}")
        self.published = version

    def send(self, event: Mapping[str, Any]) -> None:
        self.sent += 1
        _demand(self.sent <= self.taken, f"only {self.taken} batches were taken")

    def took(self, event: Mapping[str, Any]) -> None:
        engine, turns = event["engine"], [turn for turn, _ in event["orders"]]
        turns = [self.turns.get(engine, 0), *turns]
        _demand(turns == sorted(turns), f"engine {engine} took orders up before the turns {turns}")
        self.turns[engine] = turns[-1]

    def load(self, event: Mapping[str, Any]) -> None:
        engine, version = event["engine"], event["version"]
        least = max(self.published, self.held.get(engine, 0))
        _demand(least <= version <= self.taken, f"it can load {least} to {self.taken}, not {version}")
        self.held[engine] = version

    def lost(self, event: Mapping[str, Any]) -> None:
        self.held.pop(event["engine"], None)
        self.there.discard(event["engine"])
        self.leaving.discard(event["engine"])

    def joined(self, event: Mapping[str, Any]) -> None:
        _demand(
            event["engine"] not in self.there | self.held.keys(), f"engine {event['engine']} was there before"
        )
        self.there.add(event["engine"])

    def want(self, event: Mapping[str, Any]) -> None:
        self.leaving, number = set(event["leaving"]), event["engines"]
        staying = self.there - self.leaving
        _demand(self.leaving <= self.there, f"{event['leaving']} leave, and there are {sorted(self.there)}")
        _demand(1 <= number >= len(staying), f"{sorted(staying)} stay where {number} are wanted")

    def resume(self, event: Mapping[str, Any]) -> None:
        _demand(event["taken"] == self.taken, f"{self.taken} batches were taken")
        _demand(
            sorted(event["numbers"]) == sorted(self.line),
            f"it goes on with the groups {event['numbers']}; the log leaves {sorted(self.line)}",
        )
        # A branch may be longer than its run.
        self.num_batches = event["num_batches"]
        # Engines begin anew with the saved weights; of what was not finished that is left which is kept.
        self.published = self.sent = self.taken
        for known in (self.held, self.there, self.leaving, self.turns):
            known.clear()
        self.saved, self.arrived = self.arrived, {}

    def keep(self, event: Mapping[str, Any]) -> None:
        number = event["number"]
        self._unfinished(number)
        before = self.saved.pop(number, {})
        kept = [(sample, turn) for sample, num in enumerate(event["turns"]) for turn in range(num)]
        missing = [place for place in kept if place not in before]
        _demand(not missing, f"of group {number}, (sample, turn) {missing} had not arrived")
        self.arrived[number] = {place: before[place] for place in kept}

    def _known(self, number: int) -> None:
        _demand(number in self.line, f"group {number} was {self.gone.get(number, 'never started')}")

    def _unfinished(self, number: int) -> None:
        self._known(number)
        _demand(number not in self.finished, f"group {number} is finished already")

    def _leave(self, number: int, how: str) -> None:
        del self.line[number], self.prompts[number]
        self.arrived.pop(number, None)
        self.finished.pop(number, None)
        self.gone[number] = how


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise LogError(otherwise)
