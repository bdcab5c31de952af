"""Checkpoints: safetensors and JSON, checksummed, written aside and renamed.

A checkpoint is a folder. It appears whole under its final name or not at all, and `manifest.json` holds the
SHA-256 and size of every file in it, so a damaged one is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest.json"
_ASIDE = ".aside-"


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged or cannot be written; the message names it."""


def write_checkpoint(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder` out of what `fill` writes into an empty one.

    Files and folders are flushed to disk before the rename, so that a crash at any moment leaves the folder
    absent or whole. One that stands there already (a damaged one, being redone) gives way at the last moment.

    Args:
        folder: the checkpoint's final place.
        fill: writes files below the folder it is given.

    Raises:
        CheckpointError: the disk is full or read-only; nothing that was saved before is touched.
    """
    aside = folder.parent / f"{_ASIDE}{folder.name}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        fill(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        entries = {
            str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in files
        }
        (aside / MANIFEST).write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")
        for path in (*files, aside / MANIFEST, *(p for p in aside.rglob("*") if p.is_dir()), aside):
            flush(path)
        if folder.exists():
            replaced = folder.parent / f"{_ASIDE}replaced-{folder.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        aside.rename(folder)
        flush(folder.parent)
        for leftover in folder.parent.glob(f"{_ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as an error of its own.
        shutil.rmtree(aside, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: {reason}; what was saved before is intact"
        ) from error


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; a crash at any moment leaves it whole or gone, so that none is called damaged."""
    aside = folder.parent / f"{_ASIDE}removed-{folder.name}"
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def verify_checkpoint(folder: Path) -> None:
    """Read every byte and compare it with the manifest.

    Raises:
        CheckpointError: a file is missing, changed or not in the manifest.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}") from None
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    for name in sorted(there ^ set(entries)):
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {name} is {'extra' if name in there else 'missing'}"
        )
    for name, entry in entries.items():
        path = folder / name
        if path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not what was saved")


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a sentence for each damaged one that was passed over.

    Newest is by the `order` of its state (`read_state`), not by file times.
    """
    refused: list[str] = []
    best: tuple[int, Path] | None = None
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(_ASIDE) or not path.is_dir():
            continue
        try:
            verify_checkpoint(path)
            order = int(read_state(path)["order"])
        except CheckpointError as error:
            refused.append(str(error))
            continue
        if best is None or order > best[0]:
            best = (order, path)
    return (best[1] if best else None), sorted(refused)


def write_state(folder: Path, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """`state.json` and `optimizer.safetensors` into a checkpoint being filled."""
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "optimizer.safetensors"
    )


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote besides tensors.

    Raises:
        CheckpointError: it is missing or not JSON.
    """
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CheckpointError(f"checkpoint {folder} has no readable state.json") from None
    return state


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors."""
    tensors: dict[str, Tensor] = load_file(folder / "optimizer.safetensors")
    return tensors


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Have a file or folder on disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
