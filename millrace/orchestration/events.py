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
| want | `engines` from here on, `leaving`: they get no draw any more, `reason` where more were asked for |
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.observability.files import finite, parse_json, read_json_lines
from millrace.observability.sinks import JsonlSink
from millrace.orchestration.proof import FACTS, LogError, read, wrong_fact

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


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
        if missing := [name for name in FACTS.get(kind, {"such a kind": None}) if name not in facts]:
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
                    event = parse_json(line)
                except ValueError:
                    event = None
                if not isinstance(event, dict):
                    raise LogError(f"line {number} of the event log is not a JSON object")
                yield event


def read_events(path: Path, tell: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The events of a log that is only to be looked at; one that goes on from it takes `EventLog.events`.

    Args:
        path: of the log.
        tell: is told of damaged lines, which are left out.

    Raises:
        FileError: it cannot be read; or a line is damaged, and there is no `tell`.
    """
    return read_json_lines(path, _unseen, tell=tell)


def read_spans(path: Path, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """What a rank did and when, as `spans.jsonl` keeps it: `name`, `begin_s` and `seconds`.

    Args:
        path: of the file.
        tell: is told of damaged lines, which are left out.

    Raises:
        FileError: it cannot be read.
    """
    return read_json_lines(path, _wrong_span, tell=tell)


def _unseen(event: Mapping[str, Any]) -> str | None:
    """What is wrong with an event; one without a time cannot be shown."""
    return wrong_fact(event) or (None if "time_s" in event else "it has no time_s")


def _wrong_span(span: Mapping[str, Any]) -> str | None:
    if not isinstance(span.get("name"), str):
        return "it has no name"
    return None if finite(span.get("begin_s")) and finite(span.get("seconds")) else "it has no time"


def check_log(events: Iterable[Mapping[str, Any]]) -> list[int]:
    """Prove from its log alone that a run lost no group, trained none twice and kept its staleness bound.

    Args:
        events: in order, as `observability.sinks.read_metrics` reads them.

    Returns:
        the groups that are neither trained on nor dropped where the log ends; a finished run has none.

    Raises:
        LogError: the first event that contradicts those before it, and why.
    """
    return sorted(read(events).line)


def flow_after(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Prove the same as `check_log`, and say what a flow that goes on from there must hold.

    Returns:
        `num_taken`, `num_started` and `repeats` as in `Flow.state`, and `groups` that are neither trained on
        nor dropped: number, prompt, publishes when it started, and births, None until it is finished.

    Raises:
        LogError: as `check_log`.
    """
    reader = read(events)
    groups = [[n, reader.prompts[n], began, reader.finished.get(n)] for n, began in reader.line.items()]
    return {
        "num_taken": reader.taken,
        "num_started": reader.num_started,
        "repeats": list(reader.repeats),
        "groups": groups,
    }
