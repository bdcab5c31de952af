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
    numbers = all(
        count(value.get(name)) for name in ("groups_per_step", "staleness", "dynamic_sampling_rounds")
    )
    return numbers and all(isinstance(value.get(name), str) for name in ("order", "stale"))


def _are_withheld(value: Any) -> bool:
    return isinstance(value, dict) and all(_are_ints(places) for places in value.values())


def _are_commands(value: Any) -> bool:
    """Check pairs of an engine step and the commands started before it."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and _are_texts(pair[1])
        for pair in value
    )


def _are_events(value: Any) -> bool:
    """Check the events of an engine backend: each has a kind, and the fields that are used here."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and _is_text(one.get("kind"))
        and (one["kind"] != "commands_started" or _are_commands(one.get("commands")))
        for one in value
    )


def _is_anything(value: Any) -> bool:
    return True


Checks = dict[str, Callable[[Any], bool]]
_NUMBER: Checks = {"number": _is_int}
_ENGINE: Checks = {"engine": _is_text}
_TURN: Checks = {**_NUMBER, "sample": _is_int, "turn": _is_int, **_ENGINE}
# The fields of each event kind, with the type check of each for reading.
FIELDS: dict[str, Checks] = {
    "begin": {"rules": _are_rules, "num_batches": _is_int},
    "threads": {"ranks": _are_ints},
    "start": {**_NUMBER, "prompt": _is_text, "step": _is_int},
    "dispatch": {**_NUMBER, "samples": _are_ints, "turn": _is_int, **_ENGINE},
    "partial": _TURN,
    "completed": {**_TURN, "oldest_step": _is_int, "newest_step": _is_int},
    "episode_failed": {
        **_NUMBER,
        "sample": _is_int,
        "attempt": _is_int,
        "again": _is_anything,
        "reason": _is_text,
    },
    "score": {"call": _is_text, "numbers": _are_ints},
    "finish": {**_NUMBER, "oldest_steps": _are_ints, "zero_std": _is_anything},
    "drop": {**_NUMBER, "reason": _is_text},
    "take": {
        "batch": _is_int,
        "numbers": _are_ints,
        "staleness": _are_ints,
        "left_out": _are_ints,
        "withheld": _are_withheld,
    },
    "weights_updated": {"step": _is_int},
    "weights_loaded": {**_ENGINE, "step": _is_int},
    "engine_lost": {**_ENGINE, "reason": _is_text},
    "engine_joined": _ENGINE,
    "scale": {"engines": _is_int, "draining": _are_texts, "reason": _is_text},
    "ignored": {"reason": _is_text},
    "resume": {"numbers": _are_ints, "taken": _is_int, "num_batches": _is_int},
    "abort_in_flight": {},
    "restored": {**_NUMBER, "turns": _are_ints, "tokens": _is_anything},
    "save": {"name": _is_text},
    "update_weights": {"policy_version": _is_int},
    "command": {"command": _is_text},
    "events_received": {"events": _are_events},
}
# Kinds without a claim that another event could contradict.
UNCHECKED = ("threads", "ignored", "abort_in_flight", "save", "command")


class LogError(ValueError):
    """The log is inconsistent: no correct run can have written it."""


def wrong_field(event: Mapping[str, Any]) -> str | None:
    """Return the defect of an event by itself (kind, fields, types), or None."""
    kind = event.get("kind", "without a kind")
    if not isinstance(kind, str) or kind not in FIELDS:
        return "it lacks ['a kind that is known']"
    missing = [name for name in FIELDS[kind] if name not in event]
    if missing:
        return f"it lacks {missing}"
    if "time_s" in event and not finite(event["time_s"]):
        return "its time_s is no number"
    # Written by some versions, and read by a trace.
    extra = [name for name in ("began", "ended") if name in event and not _is_int(event[name])]
    wrong = [name for name, is_right in FIELDS[kind].items() if not is_right(event[name])] or extra
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
            wrong = wrong_field(event)
            _demand(wrong is None, str(wrong))
            _demand((number == 1) == (kind == "begin"), "a log has one event begin, the first")
            if kind not in UNCHECKED:
                getattr(reader, kind)(event)
        except LogError as error:
            about = plain_text(str(kind), 100)
            raise LogError(f"event {number} of the event log, {about}: {error}") from None
    return reader


class _Reader:
    """The state after each event, with one method for each event kind that is verified."""

    def __init__(self) -> None:
        self.rules: Mapping[str, Any] = {}
        self.num_batches = self.step = self.num_sent = self.taken = self.num_started = 0
        # For each group that is neither taken nor dropped: step of the weights when it started.
        self.queued: dict[int, int] = {}
        self.prompts: dict[int, str] = {}
        # Step of the oldest token: by (sample, turn) while unfinished, by sample once finished.
        self.completed_turns: dict[int, dict[tuple[int, int], int]] = {}
        self.finished: dict[int, list[int]] = {}
        # Samples of unfinished groups whose environment failed for the last time.
        self.failed_samples: dict[int, set[int]] = {}
        # Turns of unfinished groups that were completed before a resume.
        self.saved: dict[int, dict[tuple[int, int], int]] = {}
        self.gone: dict[int, str] = {}
        self.repeats: deque[str] = deque()
        # Step of the weights that each engine samples with.
        self.loaded: dict[str, int] = {}
        # Live engines, and those of them that are draining.
        self.alive: set[str] = set()
        self.draining: set[str] = set()
        # The engine step before which each engine last started a command.
        self.engine_steps: dict[str, int] = {}

    def begin(self, event: Mapping[str, Any]) -> None:
        self.rules, self.num_batches = event["rules"], event["num_batches"]

    def start(self, event: Mapping[str, Any]) -> None:
        number = event["number"]
        _demand(number == self.num_started, f"group {number} starts where {self.num_started} is next")
        _demand(event["step"] == self.step, f"the weights are of step {self.step}")
        if self.repeats:
            first = self.repeats.popleft()
            _demand(event["prompt"] == first, f"prompt {first} had to start again first")
        self.num_started += 1
        self.queued[number], self.prompts[number] = self.step, event["prompt"]

    def dispatch(self, event: Mapping[str, Any]) -> None:
        _demand(event["engine"] not in self.draining, f"engine {event['engine']} was draining")
        self._check_engine(event, event["samples"])

    def partial(self, event: Mapping[str, Any]) -> None:
        self._check_engine(event, [event["sample"]])

    def _check_engine(self, event: Mapping[str, Any], samples: Sequence[int]) -> None:
        """Check that the engine has weights and that the turn of these samples is not completed yet."""
        number, engine = event["number"], event["engine"]
        self._unfinished(number)
        _demand(engine in self.loaded, f"engine {engine} has not loaded any weights")
        seen = self.completed_turns.get(number, {})
        over = [sample for sample in samples if (sample, event["turn"]) in seen]
        _demand(not over, f"turn {event['turn']} of samples {over} of group {number} was completed before")

    def episode_failed(self, event: Mapping[str, Any]) -> None:
        number, sample = event["number"], event["sample"]
        self._unfinished(number)
        if not event["again"]:
            self.failed_samples.setdefault(number, set()).add(sample)
            return
        turns = self.completed_turns.get(number, {})
        for place in [place for place in turns if place[0] == sample]:
            del turns[place]

    def score(self, event: Mapping[str, Any]) -> None:
        for number in event["numbers"]:
            self._unfinished(number)

    def completed(self, event: Mapping[str, Any]) -> None:
        number, engine = event["number"], event["engine"]
        self._unfinished(number)
        _demand(engine in self.loaded, f"engine {engine} has not loaded any weights")
        oldest, newest = event["oldest_step"], event["newest_step"]
        _demand(
            self.queued[number] <= oldest <= newest <= self.loaded[engine],
            f"group {number} started at step {self.queued[number]} and engine {engine} has the weights of "
            f"step {self.loaded[engine]}, but the tokens are of steps {oldest} to {newest}",
        )
        place, seen = (event["sample"], event["turn"]), self.completed_turns.setdefault(number, {})
        _demand(
            place not in seen, f"sample {place[0]}, turn {place[1]} of group {number} was completed before"
        )
        seen[place] = oldest

    def finish(self, event: Mapping[str, Any]) -> None:
        number, oldest_steps = event["number"], event["oldest_steps"]
        self._unfinished(number)
        _demand(
            bool(oldest_steps)
            and self.queued[number] <= min(oldest_steps)
            and max(oldest_steps) <= self.taken,
            f"group {number} has tokens of steps {oldest_steps}, but started at step {self.queued[number]}, "
            f"and {self.taken} batches were taken",
        )
        samples: dict[int, int] = {}
        for (sample, _), oldest in self.completed_turns.pop(number, {}).items():
            samples[sample] = min(oldest, samples.get(sample, oldest))
        # An environment that failed at once leaves a sample without a token.
        failed = dict.fromkeys(self.failed_samples.pop(number, ()), self.queued[number])
        steps = [(failed | samples).get(place) for place in range(len(oldest_steps))]
        _demand(
            oldest_steps == steps,
            f"group {number} has tokens of steps {oldest_steps}, but its completed samples are {samples}",
        )
        self.finished[number] = oldest_steps

    def drop(self, event: Mapping[str, Any]) -> None:
        number = event["number"]
        self._known(number)
        _demand(bool(event["reason"]), f"group {number} is dropped without a reason")
        self.repeats.append(self.prompts[number])
        self._remove(number, "dropped")

    def take(self, event: Mapping[str, Any]) -> None:
        batch, numbers = event["batch"], event["numbers"]
        _demand(
            batch == self.taken < self.num_batches, f"{self.taken} of {self.num_batches} batches were taken"
        )
        _demand(numbers == sorted(set(numbers)), f"the groups {numbers} are not in order")
        for number in numbers:
            self._known(number)
            _demand(number in self.finished, f"group {number} is not finished")
        self._check_size(event)
        self._check_staleness(event)
        for number in numbers:
            self._remove(number, f"trained on in batch {batch}")
        overtaken = [number for number in self.queued if numbers and number < numbers[-1]]
        in_order = self.rules["order"] == "submission"
        _demand(not (in_order and overtaken), f"groups {overtaken} started before {numbers[-1:]}")
        self.taken += 1

    def _check_size(self, event: Mapping[str, Any]) -> None:
        """Check that a batch has as many groups as its places and the replaced ones."""
        numbers, left_out, size = event["numbers"], set(event["left_out"]), self.rules["groups_per_step"]
        most = min(self.rules["dynamic_sampling_rounds"] * size, len(left_out))
        _demand(
            left_out <= set(range(len(numbers))), f"left_out {sorted(left_out)} has no place in {numbers}"
        )
        _demand(
            size <= len(numbers) <= size + most,
            f"a batch of {size} with at most {most} replaced has {len(numbers)} groups",
        )

    def _check_staleness(self, event: Mapping[str, Any]) -> None:
        """Check that each group's staleness is that of its oldest trained token and within the bound."""
        batch, withheld = event["batch"], event["withheld"]
        _demand(len(event["staleness"]) == len(event["numbers"]), "each group has one staleness")
        _demand(not withheld or self.rules["stale"] == "withhold", "the rules let nothing be withheld")
        for place, (number, age) in enumerate(zip(event["numbers"], event["staleness"], strict=True)):
            out = set(withheld.get(str(number), ()))
            oldest_steps = [step for i, step in enumerate(self.finished[number]) if i not in out]
            _demand(
                not out or len(oldest_steps) >= 2, f"group {number} has {len(oldest_steps)} trajectories left"
            )
            _demand(
                age == batch - min(oldest_steps),
                f"group {number} has tokens of steps {oldest_steps}, and its logged staleness is {age}",
            )
            bound = self.rules["staleness"] if self.rules["stale"] != "keep" else age
            _demand(
                age <= bound or place in event["left_out"],
                f"group {number} has staleness {age}, more than {bound}",
            )

    def weights_updated(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        _demand(step == self.step + 1, f"the weights are of step {self.step}")
        _demand(step <= self.taken, f"only {self.taken} batches were taken")
        behind = [f"{engine} has {loaded}" for engine, loaded in self.loaded.items() if loaded < step]
        _demand(not behind, f"not every engine has loaded it: {', '.join(behind)}")
        self.step = step

    def update_weights(self, event: Mapping[str, Any]) -> None:
        self.num_sent += 1
        _demand(self.num_sent <= self.taken, f"only {self.taken} batches were taken")

    def events_received(self, event: Mapping[str, Any]) -> None:
        for one in event["events"]:
            if one["kind"] == "commands_started":
                engine = one.get("engine", "")
                steps = [self.engine_steps.get(engine, 0), *(step for step, _ in one["commands"])]
                _demand(steps == sorted(steps), f"engine {engine} started commands before its steps {steps}")
                self.engine_steps[engine] = steps[-1]

    def weights_loaded(self, event: Mapping[str, Any]) -> None:
        engine, step = event["engine"], event["step"]
        least = max(self.step, self.loaded.get(engine, 0))
        _demand(least <= step <= self.taken, f"it can load steps {least} to {self.taken}, not {step}")
        self.loaded[engine] = step

    def engine_lost(self, event: Mapping[str, Any]) -> None:
        self.loaded.pop(event["engine"], None)
        self.alive.discard(event["engine"])
        self.draining.discard(event["engine"])

    def engine_joined(self, event: Mapping[str, Any]) -> None:
        _demand(
            event["engine"] not in self.alive | self.loaded.keys(),
            f"engine {event['engine']} was there before",
        )
        self.alive.add(event["engine"])

    def scale(self, event: Mapping[str, Any]) -> None:
        self.draining, number = set(event["draining"]), event["engines"]
        serving = self.alive - self.draining
        _demand(
            self.draining <= self.alive,
            f"{event['draining']} are draining, and {sorted(self.alive)} are alive",
        )
        _demand(1 <= number >= len(serving), f"{sorted(serving)} serve where the target is {number}")

    def resume(self, event: Mapping[str, Any]) -> None:
        _demand(event["taken"] == self.taken, f"{self.taken} batches were taken")
        _demand(
            sorted(event["numbers"]) == sorted(self.queued),
            f"it goes on with the groups {event['numbers']}; the log leaves {sorted(self.queued)}",
        )
        # A branch may be longer than its run.
        self.num_batches = event["num_batches"]
        # Engines restart with the saved weights; of unfinished groups only the restored turns remain.
        self.step = self.num_sent = self.taken
        for known in (self.loaded, self.alive, self.draining, self.engine_steps):
            known.clear()
        self.saved, self.completed_turns = self.completed_turns, {}

    def restored(self, event: Mapping[str, Any]) -> None:
        number = event["number"]
        self._unfinished(number)
        before = self.saved.pop(number, {})
        kept = [(sample, turn) for sample, num in enumerate(event["turns"]) for turn in range(num)]
        missing = [place for place in kept if place not in before]
        _demand(not missing, f"of group {number}, (sample, turn) {missing} was not completed")
        self.completed_turns[number] = {place: before[place] for place in kept}

    def _known(self, number: int) -> None:
        _demand(number in self.queued, f"group {number} was {self.gone.get(number, 'never started')}")

    def _unfinished(self, number: int) -> None:
        self._known(number)
        _demand(number not in self.finished, f"group {number} is finished already")

    def _remove(self, number: int, how: str) -> None:
        del self.queued[number], self.prompts[number]
        self.completed_turns.pop(number, None)
        self.failed_samples.pop(number, None)
        self.finished.pop(number, None)
        self.gone[number] = how


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise LogError(otherwise)
