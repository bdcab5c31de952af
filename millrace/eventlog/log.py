"""The event log of a run: one event for each decision, with its cause.

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
| take | `batch`, `numbers`, `staleness` of each, `left_out`, `withheld`: as `staleness.Taken` has them |
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
| heard | `events` that were taken in together, as `rollout.backend.named` names them |
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

from millrace.eventlog.file import (
    HEADER,
    blocks,
    check_header,
    check_old,
    encode,
    read_log,
    whole_bytes,
)
from millrace.eventlog.verify import FACTS, LogError, read, wrong_fact
from millrace.observability.files import FileError, finite, read_json_lines, shown

# A block is written at the latest after so many events.
MAX_PENDING = 20_000
_SCALARS = frozenset((int, str, float, bool, type(None)))


class EventLog:
    """`events.log`: events are kept back, and handed to the operating system at each take and save.

    A killed process loses those since then, which belong to no checkpoint. `rewind` it to the `position` that
    the checkpoint was saved with. A block that a killed process left half written is cut off when the file is
    opened.

    Args:
        path: the file; made if missing, continued if there.
        clock: seconds, for `time_s` of each event.

    Raises:
        FileError: the file is of another version of millrace, or no event log.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._pending: list[dict[str, Any]] = []
        check_old(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        content = self._file.read()
        try:
            check_header(path, content)
        except FileError:
            self._file.close()
            raise
        self._file.truncate(whole_bytes(content))
        self._file.seek(0, 2)

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

    @property
    def position(self) -> int:
        """Bytes in the file, with all events so far: where to `rewind` to when a run resumes from now."""
        self._write()
        return self._file.tell()

    def add(self, kind: str, /, **facts: Any) -> None:
        """Append one event.

        Raises:
            ValueError: the kind is unknown, or a fact is missing.
        """
        needed = FACTS.get(kind)
        if needed is None or not needed.keys() <= facts.keys():
            missing = [name for name in needed or ("such a kind",) if name not in facts]
            raise ValueError(f"event {kind} lacks {missing[0]}")
        for name, value in facts.items():
            if type(value) not in _SCALARS:
                facts[name] = _as_now(value)
        self._pending.append({"kind": kind, "time_s": round(self._clock(), 6), **facts})
        if kind in ("take", "save") or len(self._pending) == MAX_PENDING:
            self._write()

    def _write(self) -> None:
        """Hand all events to the operating system as one block."""
        if not self._pending:
            return
        block = encode(self._pending)
        self._pending = []
        self._file.write(block if self._file.tell() else HEADER + block)
        self._file.flush()

    def rewind(self, position: int) -> None:
        """Forget every event after the first `position` bytes.

        Raises:
            FileError: the file is shorter than that, or no block of events ends there.
        """
        self._pending = []
        self._file.seek(0)
        content = self._file.read()
        if position > len(content):
            raise FileError(
                f"{shown(self._path)} has {len(content)} bytes but the checkpoint was saved after "
                f"{position}; it was cut or replaced since, so put the original file back or start a new run"
            )
        if position and (position <= len(HEADER) or whole_bytes(content[:position]) != position):
            raise FileError(
                f"no block of {shown(self._path)} ends where the checkpoint was saved; the file was changed "
                "since then, so put the original file back or start a new run"
            )
        self._file.truncate(position)
        self._file.seek(0, 2)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the file holds, one event at a time.

        Raises:
            LogError: a part of it is damaged.
        """
        self._write()
        self._file.seek(0)
        content = self._file.read()
        for block in blocks(content):
            if block.events is None:
                raise LogError(f"block {block.number} of the event log is damaged")
            yield from block.events

    def close(self) -> None:
        """Write what is kept back, and close the file."""
        try:
            self._write()
        finally:
            self._file.close()


def _as_now(value: Any) -> Any:
    """What JSON makes of a value, whatever becomes of it later."""
    if isinstance(value, list | tuple) and _SCALARS.issuperset(map(type, value)):
        return list(value)
    return json.loads(json.dumps(value, allow_nan=False))


def read_events(path: Path, tell: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The events of a log that is only to be looked at; one that goes on from it takes `EventLog.events`.

    Args:
        path: of the log.
        tell: is told of damaged parts, which are left out.

    Raises:
        FileError: it cannot be read, or is of another version; or a part is damaged, and there is no `tell`.
    """
    return list(read_log(path, _unseen, tell=tell))


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
        events: in order, as `read_events` reads them.

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
