"""Verification of an event log: no event may contradict earlier ones. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from millrace.observability.files import count, finite
from millrace.observability.plain import plain_text


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_rules(value: Any) -> bool:
    """Check the fields of a staleness policy that are used here."""
    if not isinstance(value, dict):
        return False
    numbers = all(count(value.get(name)) for name in ("groups_per_step", "staleness", "refill_rounds"))
    return numbers and all(isinstance(value.get(name), str) for name in ("order", "stale"))


def _are_withheld(value: Any) -> bool:
    return isinstance(value, dict) and all(_are_ints(places) for places in value.values())


def _are_orders(value: Any) -> bool:
    """Check pairs of an engine step and the letters of the commands before it."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], str)
        for pair in value
    )


def _is_anything(value: Any) -> bool:
    return True


Checks = dict[str, Callable[[Any], bool]]
_NUMBER: Checks = {"number": _is_int}
_ENGINE: Checks = {"engine": _is_text}
_TURN: Checks = {**_NUMBER, "sample": _is_int, "turn": _is_int, **_ENGINE}
# The fields of each event kind, with the type check of each for reading.
FACTS: dict[str, Checks] = {
    "begin": {"rules": _are_rules, "num_batches": _is_int},
    "threads": {"ranks": _are_ints},
    "start": {**_NUMBER, "prompt": _is_text, "published": _is_int},
    "dispatch": {**_NUMBER, "samples": _are_ints, "turn": _is_int, **_ENGINE},
    "part": _TURN,
    "arrive": {**_TURN, "oldest": _is_int, "newest": _is_int},
    "judge": {"call": _is_text, "numbers": _are_ints},
    "finish": {**_NUMBER, "births": _are_ints, "equal": _is_anything},
    "drop": {**_NUMBER, "reason": _is_text},
    "take": {
        "batch": _is_int,
        "numbers": _are_ints,
        "staleness": _are_ints,
        "left_out": _are_ints,
        "withheld": _are_withheld,
    },
    "publish": {"version": _is_int},
    "load": {**_ENGINE, "version": _is_int},
    "lost": {**_ENGINE, "reason": _is_text},
    "joined": _ENGINE,
    "want": {"engines": _is_int, "leaving": _are_texts, "reason": _is_text},
    "ignore": {"reason": _is_text},
    "resume": {"numbers": _are_ints, "taken": _is_int, "num_batches": _is_int},
    "hold": {},
    "keep": {**_NUMBER, "turns": _are_ints, "tokens": _is_anything},
    "save": {"name": _is_text},
    "heard": {"events": _are_texts},
    "send": {"version": _is_int},
    "took": {**_ENGINE, "orders": _are_orders},
    "asked": {**_ENGINE, "draws": _is_anything},
}
# Kinds without a claim that another event could contradict.
UNPROVED = ("threads", "ignore", "hold", "save", "heard", "asked")


class LogError(ValueError):
    """The log is inconsistent: no correct run can have written it."""


def wrong_fact(event: Mapping[str, Any]) -> str | None:
    """Return the defect of an event by itself (kind, fields, types), or None."""
    kind = event.get("kind", "without a kind")
    if not isinstance(kind, str) or kind not in FACTS:
        return "it lacks ['a kind that is known']"
    missing = [name for name in FACTS[kind] if name not in event]
    if missing:
        return f"it lacks {missing}"
    if "time_s" in event and not finite(event["time_s"]):
        return "its time_s is no number"
    # Written by some versions, and read by a trace.
    extra = [name for name in ("began", "ended") if name in event and not _is_int(event[name])]
    wrong = [name for name, is_right in FACTS[kind].items() if not is_right(event[name])] or extra
    return f"its {wrong[0]} is not what a run writes there" if wrong else None


def read(events: Iterable[Mapping[str, Any]]) -> _Reader:
    """Verify a log, and return the state at its end.

    Args:
        events: of a log, in order.

    Raises:
        LogError: an event contradicts earlier ones; the message has the first one and the reason.
    """
    reader = _Reader()
    for number, event in enumerate(events, start=1):
        kind = event.get("kind", "without a kind")
        try:
            wrong = wrong_fact(event)
            _demand(wrong is None, str(wrong))
            _demand((number == 1) == (kind == "begin"), "a log has one event begin, the first")
            if kind not in UNPROVED:
                getattr(reader, kind)(event)
        except LogError as error:
            about = plain_text(str(kind), 100)
            raise LogError(f"event {number} of the event log, {about}: {error}") from None
    return reader


class _Reader:
    """The state after each event, with one method for each event kind that is verified."""

    def __init__(self) -> None:
        self.rules: Mapping[str, Any] = {}
        self.num_batches = self.published = self.sent = self.taken = self.num_started = 0
        # For each group that is neither taken nor dropped: policy version when it started.
        self.line: dict[int, int] = {}
        self.prompts: dict[int, str] = {}
        # Policy version of the oldest token: by (sample, turn) while unfinished, by sample once finished.
        self.arrived: dict[int, dict[tuple[int, int], int]] = {}
        self.finished: dict[int, list[int]] = {}
        # Turns of unfinished groups that had arrived before a resume.
        self.saved: dict[int, dict[tuple[int, int], int]] = {}
        self.gone: dict[int, str] = {}
        self.repeats: deque[str] = deque()
        # Policy version that each engine samples with.
        self.held: dict[str, int] = {}
        # Live engines, and those of them that are draining.
        self.there: set[str] = set()
        self.leaving: set[str] = set()
        # The engine step before which each engine last started a command.
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
        """Check that the engine has weights and that the turn of these samples has not arrived yet."""
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
        """Check that a batch has as many groups as its places and the replaced ones."""
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
        """Check that each group's staleness is that of its oldest trained token and within the bound."""
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
        # Engines restart with the saved weights; of unfinished groups only the turns in `keep` remain.
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
