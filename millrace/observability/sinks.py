"""Sinks of metric records: a file of JSON lines, TensorBoard, and any class with the `Sink` protocol.

A record is flat and has the keys `stage` ("sft", "reinforcement" or "evaluation") and `step`. The record
of an evaluation also has `during`, the training stage in which it was made.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from millrace.observability.files import FileError, count, finite, read_json_lines, read_text, shown

Record = Mapping[str, float | int | str]
STAGES = ("sft", "reinforcement", "evaluation")
# Names in runs of older versions.
RENAMED_STAGES = {"warmup": "sft"}
RENAMED_METRICS = {
    "reward/invalid_share": "reward/invalid_fraction",
    "reward/failed_share": "reward/failed_fraction",
    "length/truncated_share": "length/truncated_fraction",
    "group/equal_share": "group/zero_std_fraction",
    "group/refill_rounds": "group/dynamic_sampling_rounds",
    "policy/clip_share": "policy/clip_fraction",
    "policy/bounded_share": "policy/correction_clip_fraction",
    "critic/clip_share": "critic/clip_fraction",
    "gradient_norm": "grad_norm",
    **{
        f"{model}/gradient_norm{kind}": f"{model}/grad_norm{kind}"
        for model in ("policy", "critic")
        for kind in ("", "_matrices", "_vectors")
    },
    "mismatch/effective_share": "mismatch/ess",
    "bias/dropped_share": "selection_bias/dropped_fraction",
    **{f"bias/{name}": f"selection_bias/{name}" for name in ("length", "reward", "difficulty")},
    "sync/payload_bytes": "weight_sync/payload_bytes",
    "sync/payload_share": "weight_sync/payload_fraction",
    "time/sync_s": "time/weight_sync_s",
    "memory/sync_peak_bytes": "memory/weight_sync_peak_bytes",
}


class TrackerError(RuntimeError):
    """A tracker cannot be used; the message names the fix."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker is told of it; a resumed one continues there, by the id in `TRACKER_id.txt`.

    Attributes:
        folder: of the run, whose name the run has.
        settings: by dotted keys.
        project: that the run is listed in.
        group: of runs; None is none.
    """

    folder: Path
    settings: Mapping[str, Any]
    project: str = "millrace"
    group: str | None = None

    def package(self, tracker: str) -> Any:
        """Import a tracker's package; TrackerError if it is not installed."""
        try:
            return importlib.import_module(tracker)
        except ModuleNotFoundError:
            raise TrackerError(
                f"the tracker {tracker} needs a package that is not installed; "
                f"run `pip install 'millrace-rl[{tracker}]'` or take {tracker} out of loggers"
            ) from None

    def known_id(self, tracker: str) -> str | None:
        """Return the tracker's id of the run; None for a new one."""
        path, mend = self._id_file(tracker), f"remove it to start another run of {tracker}"
        return read_text(path, mend=mend).strip() if path.exists() else None

    def keep_id(self, tracker: str, run_id: str) -> None:
        """Write the tracker's id of the run, to continue it."""
        self._id_file(tracker).write_text(f"{run_id}\n", encoding="utf-8")

    def _id_file(self, tracker: str) -> Path:
        return self.folder / f"{tracker}_id.txt"


class Sink(Protocol):
    """Takes the records of a run."""

    def write(self, record: Record) -> None:
        """Keep one record."""
        ...

    def close(self) -> None:
        """Finish writing; nothing is written after this."""
        ...


class JsonlSink:
    """Writes one JSON object per line and flushes each to the OS, so that a killed process loses none.

    An existing file is continued; an incomplete last line of a killed process is truncated.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)
        self._file.seek(0, 2)

    @property
    def position(self) -> int:
        """Bytes in the file: where to `rewind` to when a run resumes from now."""
        return self._file.tell()

    def write(self, record: Record) -> None:
        """Append one record, null for a number that is not finite; TypeError beside numbers and text."""
        told = {key: plain(key, value) for key, value in record.items()}
        self._file.write(
            json.dumps(told, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        )
        self._file.flush()

    def rewind(self, position: int) -> None:
        """Forget the records after `position` bytes; FileError if no record ends there."""
        size = self._file.seek(0, 2)
        if position > size:
            raise FileError(
                f"{shown(self._path)} has {size} bytes but the checkpoint was saved after {position}; it was "
                "cut or replaced since, so put the original file back or start a new run"
            )
        self._file.seek(max(position - 1, 0))
        if position < 0 or (position > 0 and self._file.read(1) != b"\n"):
            self._file.seek(0, 2)
            raise FileError(
                f"no record of {shown(self._path)} ends at byte {position}; the file was edited since the "
                "checkpoint, so put the original file back or start a new run"
            )
        self._file.truncate(position)
        self._file.seek(0, 2)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path, warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, under today's names; null where a number was not finite.

    `warn` takes a message about damaged lines, which are then skipped; without it they are a FileError.
    """
    records = read_json_lines(path, lambda record: _wrong_record(_renamed(record)), warn=warn)
    return [_renamed(record) for record in records]


def _renamed(record: Mapping[str, Any]) -> dict[str, Any]:
    found = {RENAMED_METRICS.get(name, name): value for name, value in record.items()}
    for name in ("stage", "during"):
        if isinstance(stage := found.get(name), str):
            found[name] = RENAMED_STAGES.get(stage, stage)
    return found


def _wrong_record(record: Mapping[str, Any]) -> str | None:
    if record.get("stage") not in STAGES:
        return "its stage is none that there is"
    if record["stage"] == "evaluation" and record.get("during") not in STAGES:
        return "it has no stage under during"
    if not count(record.get("step")):
        return "its step is no number"
    for name, value in record.items():
        if not (value is None or isinstance(value, str) or finite(value)):
            return f"{name} is neither a number nor text"
    return None


def tagged(record: Record) -> tuple[int, dict[str, float]]:
    """The step of a record and its numbers under the tags that loggers use.

    Reinforcement keeps its keys (`reward/mean`); the rest go under `sft/`, `evaluation/` and
    `sft_evaluation/`, so that no tag holds the numbers of two stages, which count their own steps.
    """
    stage = str(record["stage"])
    prefix = "" if stage == "reinforcement" else f"{stage}/"
    if stage == "evaluation" and record["during"] == "sft":
        prefix = "sft_evaluation/"
    numbers = {
        f"{prefix}{key}": float(value)
        for key, value in record.items()
        if key != "step" and not isinstance(value, str)
    }
    return int(record["step"]), numbers


def plain(key: str, value: object) -> float | int | str | None:
    """Convert a value to a JSON type; NumPy numbers become Python numbers, non-finite ones None."""
    if isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"metric {key} is a {type(value).__name__}; a record holds numbers and text only")
