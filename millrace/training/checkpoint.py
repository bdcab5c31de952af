"""Checkpoints: folders of safetensors and JSON, checksummed, filled aside and renamed.

A checkpoint appears whole under its final name or not at all, and `manifest.json`, written last, holds the
SHA-256 and size of every file in it, so a damaged one is refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from millrace.errors import CheckpointError
from millrace.observability.files import (
    MANIFEST,
    FileError,
    Shape,
    first_changed,
    read_json,
    read_manifest,
    sha256,
    shown,
)

_ASIDE = ".aside-"


class _Order(Shape):
    order: int


# Files of a checkpoint by their name in it, each with its size and SHA-256.
Entries = dict[str, dict[str, Any]]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a full or read-only disk, or a missing folder, into a CheckpointError of one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as an error of its own.
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: {reason}; what was saved before is intact"
        ) from error


def aside_of(folder: Path) -> Path:
    """Where a checkpoint is filled before it appears as `folder`."""
    return folder.parent / f"{_ASIDE}{folder.name}"


def begin_checkpoint(folder: Path) -> Path:
    """An empty folder aside, to be filled; `seal_checkpoint` makes it the checkpoint `folder`."""
    aside = aside_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def flushed(aside: Path, files: Iterable[Path]) -> Entries:
    """Flush files of an unfinished checkpoint to disk, and return their entries."""
    entries = {}
    for path in files:
        flush(path)
        entries[str(path.relative_to(aside))] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return entries


def seal_checkpoint(folder: Path, entries: Entries) -> None:
    """Make what was filled aside the checkpoint `folder`.

    All is on disk before the rename, so that a crash at any moment leaves the folder absent or whole. One
    that is there already (a damaged one, being redone) gives way at the last moment. `entries` are of the
    files that other ranks have flushed; all others are flushed here.

    Raises:
        CheckpointError: another rank's file is not to be seen here.
    """
    aside = aside_of(folder)
    files = {str(path.relative_to(aside)): path for path in sorted(aside.rglob("*")) if path.is_file()}
    for name in sorted(entries.keys() - files.keys()):
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: another rank wrote {name} and the first one does not "
            "see it; put the run folder on a file system that all machines share"
        )
    entries = entries | flushed(aside, (path for name, path in files.items() if name not in entries))
    manifest = {"files": {name: entries[name] for name in files}}
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (aside / MANIFEST, *(p for p in aside.rglob("*") if p.is_dir()), aside):
        flush(path)
    if folder.exists():
        replaced = folder.parent / f"{_ASIDE}replaced-{folder.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    aside.rename(folder)
    flush(folder.parent)
    sweep(folder.parent)


def sweep(checkpoints: Path) -> None:
    """Remove what dead processes left aside, half written or half removed; nothing may be being written."""
    for leftover in checkpoints.glob(f"{_ASIDE}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def discard_checkpoint(folder: Path) -> None:
    """Forget what was filled aside."""
    shutil.rmtree(aside_of(folder), ignore_errors=True)


def write_checkpoint(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder` at once, out of what `fill` writes into an empty one.

    Raises:
        CheckpointError: it cannot be written; nothing that was saved before is touched.
    """
    try:
        with writing(folder):
            fill(begin_checkpoint(folder))
            seal_checkpoint(folder, {})
    except CheckpointError:
        discard_checkpoint(folder)
        raise


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; a crash at any moment leaves it whole or gone, so that none is called damaged."""
    aside = folder.parent / f"{_ASIDE}removed-{folder.name}"
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def verify_checkpoint(folder: Path) -> None:
    """Compare every byte with the manifest; CheckpointError if a file is missing, changed or not in it."""
    try:
        entries = read_manifest(folder)
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    except (FileError, OSError):
        raise CheckpointError(f"checkpoint {shown(folder)} has no readable {MANIFEST}") from None
    for name in sorted(there ^ set(entries)):
        raise CheckpointError(
            f"checkpoint {shown(folder)} is damaged: {shown(name)} is "
            f"{'extra' if name in there else 'missing'}"
        )
    if (changed := first_changed(folder, entries)) is not None:
        raise CheckpointError(f"checkpoint {shown(folder)} is damaged: {changed}")


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a sentence for each damaged one that was passed over.

    Newest is by the `order` of its state (`read_state`), not by file times. Nothing older is read.
    """
    refused: list[str] = []
    orders: dict[Path, int] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(_ASIDE) or not path.is_dir():
            continue
        try:
            orders[path] = read_json(path / "state.json", _Order).order
        except FileError:
            # It may be the newest one: its damage is reported first.
            orders[path] = sys.maxsize
    for path in sorted(orders, key=lambda path: (-orders[path], path)):
        try:
            verify_checkpoint(path)
            read_state(path)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return path, sorted(refused)
    return None, sorted(refused)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `state.json` into a checkpoint being filled."""
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Read `state.json`; CheckpointError if it is missing or not a JSON object."""
    try:
        return read_json(folder / "state.json", dict[str, Any])
    except FileError:
        raise CheckpointError(f"checkpoint {shown(folder)} has no readable state.json") from None


def flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
