"""Bitwise comparison of a replay with its run: records, samples and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.errors import CheckpointError
from millrace.observability.files import MANIFEST, FileError, read_manifest
from millrace.observability.sinks import Record, plain, read_records
from millrace.observability.tables import read_table
from millrace.replay.recorded_log import ReplayError
from millrace.run.folder import RunFolder
from millrace.training.checkpoint import verify_checkpoint

# Measurements of time and memory are not reproducible.
MEASURED = ("time/", "memory/")
# The reproducible files of a checkpoint; the others contain times or file offsets.
WEIGHTS = ("model/", "optimizer/", "critic/", "rollouts.safetensors")


class Comparison:
    """A `sinks.Sink` that raises at the first record or table of samples that differs from the original."""

    def __init__(self, original: RunFolder, repeated: RunFolder) -> None:
        """Start after the records that were replayed before."""
        self._original, self._repeated = original, repeated
        self._records = read_records(original.metrics)
        self._num_seen = len(read_records(repeated.metrics))

    def write(self, record: Record) -> None:
        """Compare a record, and the samples of its batch, with those of the original.

        Raises:
            ReplayError: they differ; the message has the place.
        """
        about = f"{record['stage']}, step {record['step']}"
        if self._num_seen == len(self._records):
            raise ReplayError(f"{about}: the run has no such record")
        recorded = self._records[self._num_seen]
        self._num_seen += 1
        check_same(about, recorded, {key: plain(key, value) for key, value in record.items()})
        if record["stage"] == "reinforcement":
            name = f"step-{record['step']:06d}.parquet"
            check_tables(self._original.rollouts / name, self._repeated.rollouts / name)

    def close(self) -> None:
        """Release nothing."""


def check_same(about: str, original: Mapping[str, Any], repeated: Mapping[str, Any]) -> None:
    """Compare two records or rows, except for their measurements.

    Raises:
        ReplayError: a value differs.
    """
    for key in {**original, **repeated}:
        replayed, recorded = repeated.get(key), original.get(key)
        # As text, because NaN is not equal to itself.
        if not key.startswith(MEASURED) and repr(replayed) != repr(recorded):
            raise ReplayError(f"{about}: {key} was {recorded} in the run and is {replayed} in the replay")


def check_tables(original: Path, repeated: Path) -> None:
    """Compare two tables row by row.

    Raises:
        ReplayError: they differ.
    """
    about = f"{original.parent.name}/{original.name}"
    try:
        recorded, replayed = read_table(original), read_table(repeated)
    except FileError as error:
        raise ReplayError(str(error)) from None
    if len(replayed) != len(recorded):
        raise ReplayError(
            f"{about} had {len(recorded)} rows in the run and has {len(replayed)} in the replay"
        )
    for place, rows in enumerate(zip(recorded, replayed, strict=True)):
        check_same(f"{about}, row {place}", *rows)


def check_evaluations(original: RunFolder, repeated: RunFolder) -> None:
    """Compare the saved held-out answers.

    Raises:
        ReplayError: they differ.
    """
    for table in sorted(repeated.evaluations.rglob("*.parquet")):
        kept = original.evaluations / table.relative_to(repeated.evaluations)
        # An older millrace kept no folders of answers.
        if kept.parent.is_dir():
            check_tables(kept, table)


def check_weights(original: RunFolder, repeated: RunFolder) -> Sequence[str]:
    """Compare every common checkpoint: the files of every rank, by their checksums.

    Returns:
        the names of the compared checkpoints.

    Raises:
        ReplayError: a file differs, or was modified after the run saved it.
    """
    both = sorted(set(_checkpoints(original)) & set(_checkpoints(repeated)))
    for name in both:
        recorded, replayed = (_sums(folder.checkpoints / name) for folder in (original, repeated))
        for file in sorted({**recorded, **replayed}):
            if recorded.get(file) != replayed.get(file):
                raise ReplayError(f"checkpoint {name}: {file} is not that of the run")
        try:
            verify_checkpoint(original.checkpoints / name)
        except CheckpointError as error:
            raise ReplayError(str(error)) from None
    return both


def _checkpoints(folder: RunFolder) -> Iterator[str]:
    return (path.parent.name for path in folder.checkpoints.glob(f"[ws]*/{MANIFEST}"))


def _sums(checkpoint: Path) -> dict[str, str]:
    try:
        files = read_manifest(checkpoint)
    except FileError as error:
        raise ReplayError(str(error)) from None
    return {name: entry.sha256 for name, entry in files.items() if name.startswith(WEIGHTS)}
