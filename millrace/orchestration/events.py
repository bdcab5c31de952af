"""The event log of a run: one line for each decision, with its cause.

| kind | facts |
|---|---|
| begin | `rules` of the flow, `num_batches`; the first line |
| threads | `ranks`: with how many each rank computes, in this process of its |
| start | `number`, `prompt`, `published`: publishes so far |
| dispatch | `number`, `samples` whose turn `turn` the `engine` is to draw |
| part | `number`, `sample`, `turn`, `engine`: what it drew of it, which goes on from there or elsewhere |
| arrive | `number`, `sample`, `turn`, `engine`, `oldest`, `newest`: publishes before these tokens |
| judge | `call` of the reward, `numbers` of the groups |
| finish | `number`, `births`: `oldest` of each sample from the first on, `equal`: whether its rewards are |
| drop | `number`, `reason`; its prompt starts again, before new ones |
| take | `batch`, `numbers`, `staleness` of each, `left_out`, `withheld`: as `flow.Taken` has them |
| publish | `version`: publishes with this one |
| load | `engine`, `version`: publishes whose weights it draws with from here on; at first those it has |
| lost | `engine`, `reason` |
| joined | `engine` |
| ignore | `reason`: what came too late, or twice |
| hold | engines hand over what they have drawn |
| keep | `number`; after a resume, `turns` and `tokens` of the turn begun that each sample has already |
| resume | `numbers` of the groups that are neither trained on nor dropped, `taken` batches, `num_batches` |
| save | `name` of the checkpoint |
| heard | `events` that were taken in together, as `runtime.script.named` names them |
| send | `version`: the trainer's weights are sent |
| took | `engine`, `orders`: their letters, by the turn before which it took them up |
| asked | `engine`, `draws` whose caller waits, such as an evaluation's |

A `Flow` notes start, finish, drop, take, publish and resume itself; who drives it notes the others. Threads
and the last four are for `replayed`. More facts may stand beside these.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.observability.sinks import JsonlSink

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
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class LogError(ValueError):
    """A log that no sound run can have written."""


class EventLog(JsonlSink):
    """`events.jsonl`: events are kept back and handed to the operating system at each take and save.

    A killed process loses those since then, which belong to no checkpoint. `rewind` it to the `position` that
    the checkpoint was saved with.

    Args:
        path: the file; made if missing, continued if there.
        clock: seconds, for `time_s` of each event.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(path)
        self._clock = clock

    @property
    def replays(self) -> bool:
        """Whether it holds what is to happen; then no clock decides anything."""
        return False

    @property
    def ended(self) -> bool:
        """Whether nothing is to happen any more of what it holds."""
        return False

    def reached(self, kind: str) -> bool:
        """Whether the trainer may do what this kind says; a replay waits until the run did."""
        return True

    def add(self, kind: str, /, **facts: Any) -> None:
        """Append one event.

        Raises:
            ValueError: the kind is unknown, or a fact is missing.
        """
        if missing := [name for name in FACTS.get(kind, ("such a kind",)) if name not in facts]:
            raise ValueError(f"event {kind} lacks {missing[0]}")
        event = {"kind": kind, "time_s": round(self._clock(), 6), **facts}
        self._file.write(_ENCODER.encode(event).encode() + b"\n")
        if kind in ("take", "save"):
            self._file.flush()

    def events(self) -> Iterator[dict[str, Any]]:
        """What the file holds, one event at a time.

        Raises:
            LogError: a line is no JSON object.
        """
        self._file.flush()
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    event = json.loads(line)
                except ValueError:
                    event = None
                if not isinstance(event, dict):
                    raise LogError(f"line {number} of the event log is not a JSON object")
                yield event


def check_log(events: Iterable[Mapping[str, Any]]) -> list[int]:
    """Prove from its log alone that a run lost no group, trained none twice and kept its staleness bound.

    Args:
        events: in order, as `observability.sinks.read_metrics` reads them.

    Returns:
        the groups that are neither trained on nor dropped where the log ends; a finished run has none.

    Raises:
        LogError: the first event that contradicts those before it, and why.
    """
    return sorted(_read(events).line)


def flow_after(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Prove the same as `check_log`, and say what a flow that goes on from there must hold.

    Returns:
        `num_taken`, `num_started` and `repeats` as in `Flow.state`, and `groups` that are neither trained on
        nor dropped: number, prompt, publishes when it started, and births, None until it is finished.

    Raises:
        LogError: as `check_log`.
    """
    reader = _read(events)
    groups = [[n, reader.prompts[n], began, reader.finished.get(n)] for n, began in reader.line.items()]
    return {
        "num_taken": reader.taken,
        "num_started": reader.num_started,
        "repeats": list(reader.repeats),
        "groups": groups,
    }


def _read(events: Iterable[Mapping[str, Any]]) -> _Reader:
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
        number, engine = event["number"], event["engine"]
        self._unfinished(number)
        _demand(engine in self.held, f"engine {engine} has not loaded any weights")
        seen = self.arrived.get(number, {})
        over = [sample for sample in event["samples"] if (sample, event["turn"]) in seen]
        _demand(not over, f"turn {event['turn']} of samples {over} of group {number} arrived before")

    def part(self, event: Mapping[str, Any]) -> None:
        self.dispatch({**event, "samples": [event["sample"]]})

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

    def joined(self, event: Mapping[str, Any]) -> None:
        _demand(event["engine"] not in self.held, f"engine {event['engine']} was there before")

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
        self.held.clear()
        self.turns.clear()
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
