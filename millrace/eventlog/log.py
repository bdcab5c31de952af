"""The event log of a run: one event for each decision, with its cause.

| kind | fields |
|---|---|
| begin | `rules` (staleness policy), `num_batches`; the first event |
| threads | `ranks`: number of compute threads of each rank in the current process |
| start | `number`, `prompt`, `step` of the weights in force |
| dispatch | `number`, `samples`, `turn`, `engine`: this turn of the samples is submitted to the engine |
| partial | `number`, `sample`, `turn`, `engine`: partial output; generation continues on any engine |
| completed | `number`, `sample`, `turn`, `engine`, `oldest_step`, `newest_step` of its tokens |
| episode_failed | `number`, `sample`, `attempt`, `reason`, sampled `tokens`; `again`: it is played again |
| score | `call` of the reward, `numbers` of the groups |
| finish | `number`, `oldest_steps`: `oldest_step` of each sample, `zero_std`: whether its rewards are equal |
| drop | `number`, `reason`; its prompt starts again, before new ones |
| take | `batch`, `numbers`, `staleness` of each, `left_out`, `withheld`: as in `TakenBatch` |
| weights_updated | `step` of the weights that are in force from here on |
| weights_loaded | `engine`, `step` of the weights that it samples with from here on, also its first |
| engine_lost | `engine`, `reason` |
| engine_joined | `engine` |
| scale | `engines`: target number from here on, `draining` ones, `reason` if more were requested |
| ignored | `reason`: a late or duplicate event |
| abort_in_flight | in-flight requests are aborted for their partial output |
| restored | `number`; after a resume, finished `turns` and `tokens` of the unfinished turn of each sample |
| resume | `numbers` of the groups that are neither trained on nor dropped, `taken` batches, `num_batches` |
| save | `name` of the checkpoint |
| update_weights | `policy_version` of the trainer's weights, which are sent to the engines |
| command | `command`: its kind, and its fields; see `rollout.recorder` |
| events_received | `events` that were handled together: `kind` and fields of each |

Step `s` of the weights: they were trained on `s` batches (see `rollout.staleness`). `policy_version` counts
optimizer steps. A `StalenessController` logs start, finish, drop, take, weights_updated and resume itself;
its caller logs the others. `threads` and the last two are for replays: what a `rollout.backend.EngineBackend`
was to do and what it reported. Events may have further fields.
"""

from __future__ import annotations

import json
import math
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
from millrace.eventlog.verify import FIELDS, LogError, read, wrong_field
from millrace.observability.files import FileError, finite, read_json_lines, shown

# A block is written after at most so many events.
MAX_PENDING = 20_000
_SCALARS = frozenset((int, str, float, bool, type(None)))
_EXACT = _SCALARS - {float}


class EventLog:
    """Writer of `events.log`: events are buffered, and written to the file at each take and save.

    A killed process loses the buffered events, which belong to no checkpoint. To resume, `rewind` to the
    `position` saved in the checkpoint. Opening the file truncates a half-written last block.

    Args:
        path: the file; created if missing, else continued.
        clock: seconds, for `time_s` of each event.

    Raises:
        FileError: the file is of another version of millrace, or is not an event log.
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
        """Whether this is a replay, in which the recorded log replaces the clock."""
        return False

    @property
    def ended(self) -> bool:
        """Whether a replay has reached the end of its recorded log."""
        return False

    def reached(self, kind: str) -> bool:
        """Return whether the trainer may take the action of this event kind; a replay waits for its turn."""
        return True

    @property
    def position(self) -> int:
        """Size of the file in bytes with all events so far: the argument of a later `rewind`."""
        self._write()
        return self._file.tell()

    def add(self, kind: str, /, **fields: Any) -> None:
        """Append one event.

        Raises:
            ValueError: the kind is unknown, or a field is missing.
        """
        needed = FIELDS.get(kind)
        if needed is None or not needed.keys() <= fields.keys():
            missing = [name for name in needed or ("such a kind",) if name not in fields]
            raise ValueError(f"event {kind} lacks {missing[0]}")
        for name, value in fields.items():
            if type(value) not in _SCALARS:
                fields[name] = _json_copy(value)
        self._pending.append({"kind": kind, "time_s": round(self._clock(), 6), **fields})
        if kind in ("take", "save") or len(self._pending) == MAX_PENDING:
            self._write()

    def _write(self) -> None:
        """Write all buffered events as one block, and flush."""
        if not self._pending:
            return
        block = encode(self._pending)
        self._pending = []
        self._file.write(block if self._file.tell() else HEADER + block)
        self._file.flush()

    def rewind(self, position: int) -> None:
        """Delete every event after the first `position` bytes.

        Raises:
            FileError: the file is shorter than that, or no block ends there.
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
        """Yield the events of the file.

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
        """Write the buffered events, and close the file."""
        try:
            self._write()
        finally:
            self._file.close()


def _json_copy(value: Any) -> Any:
    """Return a JSON copy of a value, which later mutations do not affect."""
    if isinstance(value, list | tuple) and _SCALARS.issuperset(map(type, value)):
        return list(value)
    return _deep_copy(value)


def _deep_copy(value: Any) -> Any:
    """As JSON writes and reads it, which refuses numbers that are not finite; the usual types at once."""
    kind = type(value)
    if kind in _EXACT or (kind is float and math.isfinite(value)):
        return value
    if kind is list or kind is tuple:
        return [_deep_copy(one) for one in value]
    if kind is dict and all(type(name) is str for name in value):
        return {name: one if type(one) in _EXACT else _deep_copy(one) for name, one in value.items()}
    return json.loads(json.dumps(value, allow_nan=False))


def read_events(path: Path, warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Read the events of a log without opening it for writing; to continue a log, use `EventLog.events`.

    Args:
        path: of the log.
        warn: callback for a message about damaged parts, which are skipped.

    Raises:
        FileError: the file is unreadable or of another version, or a part is damaged and `warn` is None.
    """
    return list(read_log(path, _wrong_event, warn=warn))


def read_spans(path: Path, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Read the timed spans of a rank from `spans.jsonl`: `name`, `begin_s` and `seconds`.

    Args:
        path: of the file.
        warn: callback for a message about damaged lines, which are skipped.

    Raises:
        FileError: the file is unreadable.
    """
    return read_json_lines(path, _wrong_span, warn=warn)


def _wrong_event(event: Mapping[str, Any]) -> str | None:
    """Return the defect of an event, or None; an event without a time cannot be displayed."""
    return wrong_field(event) or (None if "time_s" in event else "it has no time_s")


def _wrong_span(span: Mapping[str, Any]) -> str | None:
    if not isinstance(span.get("name"), str):
        return "it has no name"
    return None if finite(span.get("begin_s")) and finite(span.get("seconds")) else "it has no time"


def check_log(events: Iterable[Mapping[str, Any]]) -> list[int]:
    """Verify from its log alone that a run lost no group, trained none twice and kept its staleness bound.

    Args:
        events: in order, as `read_events` returns them.

    Returns:
        the groups that are neither trained on nor dropped at the end of the log; a finished run has none.

    Raises:
        LogError: an event contradicts earlier ones; the message has the first one and the reason.
    """
    return sorted(read(events).queued)


def resumed_state(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Verify a log like `check_log`, and return the expected state of a resumed staleness controller.

    Returns:
        `num_taken`, `num_started` and `repeats` as in `StalenessController.state`, and `groups` that are
        neither trained on nor dropped: number, prompt, step when it started, and the step of the oldest token
        of each trajectory, None until it is finished.

    Raises:
        LogError: as `check_log`.
    """
    reader = read(events)
    groups = [[n, reader.prompts[n], step, reader.finished.get(n)] for n, step in reader.queued.items()]
    return {
        "num_taken": reader.taken,
        "num_started": reader.num_started,
        "repeats": list(reader.repeats),
        "groups": groups,
    }
