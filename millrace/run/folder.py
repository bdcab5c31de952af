"""The run folder: its paths, its lock and its checkpoints."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any

from pydantic import Field

from millrace.config.recipe import from_yaml
from millrace.config.settings import RunConfig
from millrace.errors import CheckpointError
from millrace.observability.files import (
    RESTORE,
    FileError,
    Shape,
    check_name,
    check_saved_model,
    notice,
    read_json,
    read_text,
    shown,
)
from millrace.observability.plain import plain_text
from millrace.training.checkpoint import (
    newest_checkpoint,
    read_state,
    remove_checkpoint,
    sweep,
    verify_checkpoint,
)

# Name of a checkpoint; warmup- is the earlier name of sft-.
NAME = re.compile(r"^(sft|warmup|step)-[0-9]+$")


class RunFolderError(RuntimeError):
    """A run folder that cannot be made or used; the message says what to change."""


class _Best(Shape):
    """Content of `best.json`."""

    checkpoint: Annotated[str, Field(pattern=NAME.pattern)]


class RunFolder:
    """The paths of a run, and a lock that admits one process at a time."""

    def __init__(self, path: Path, *, shared: Path | None = None, rank: int = 0) -> None:
        """Name the paths of a run folder; see `create` and `open`.

        Args:
            path: the run folder; on other ranks than rank 0, a temporary folder.
            shared: the run folder where `path` is temporary; for the files that every rank writes.
            rank: that uses these paths.
        """
        shared = shared or path
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.log"
        self.spans = shared / (f"spans-rank-{rank}.jsonl" if rank else "spans.jsonl")
        self.rollouts = path / "rollouts"
        self.evaluations = path / "evaluations"
        self.recorded = path / "recorded"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = shared / "checkpoints"
        self.evidence = path / "evidence"
        self.profile = path / "profile"
        self.summary = path / "summary.json"
        self.best = path / "best.json"
        self.status = path / "status.json"
        self.scale_request = path / "scale.json"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, output: str, name: str | None, recipe: str) -> RunFolder:
        """Create a new, empty run folder and lock it.

        Args:
            output: parent of the run folder.
            name: of the run; None takes the first free `recipe-N`.
            recipe: name of the recipe.

        Raises:
            RunFolderError: the name is taken, or the folder cannot be made.
        """
        root = Path(output)
        if (wrong := check_name(root / (name or recipe))) is not None:
            raise RunFolderError(wrong)
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = root / (name or f"{recipe}-{number}")
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    if name is not None:
                        raise RunFolderError(_occupied(path)) from None
        except OSError as error:
            raise RunFolderError(f"run folder {shown(root)} cannot be made: {error.strerror}") from error
        folder = cls(path)
        folder.lock()
        return folder

    def spans_of_ranks(self) -> list[Path]:
        """Span files that exist, by rank."""
        others = sorted(self.path.glob("spans-rank-*.jsonl"), key=lambda path: int(path.stem.split("-")[-1]))
        return [path for path in (self.spans, *others) if path.is_file()]

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run folder, without locking it.

        Raises:
            RunFolderError: it does not exist.
            FileError: its recipe is not text.
        """
        if (wrong := check_name(path)) is not None:
            raise RunFolderError(wrong)
        folder = cls(Path(path))
        try:
            folder.recipe.lstat()
        except OSError:
            raise RunFolderError(f"{shown(path)} is not a run folder (it has no recipe.yaml)") from None
        # Every caller reads the recipe next.
        read_text(folder.recipe)
        return folder

    def config(self) -> RunConfig:
        """Read the settings that the run was started with.

        Raises:
            FileError: its recipe cannot be read.
            ConfigError: its recipe is invalid.
        """
        return from_yaml(read_text(self.recipe), str(self.recipe))

    def lock(self) -> None:
        """Lock the folder until this process, or a `with` block of the folder, ends.

        Raises:
            RunFolderError: another process holds the lock.
        """
        try:
            file = (self.path / ".lock").open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise
            self._lock = file
        except BlockingIOError:
            raise RunFolderError(f"run {shown(self.path)} is being trained by another process") from None
        except OSError as error:
            raise RunFolderError(
                f"run folder {shown(self.path)} cannot be written: {error.strerror}"
            ) from error

    def is_busy(self) -> bool:
        """Whether a process works on the run; writes nothing.

        Raises:
            OSError: the lock cannot be read.
        """
        try:
            # Non-blocking, since the file may have been replaced by a pipe.
            handle = os.open(self.path / ".lock", os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def has_results(self) -> bool:
        """Whether the folder has metrics, checkpoints or evidence."""
        written = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return written or any(any(place.glob("*")) for place in (self.checkpoints, self.evidence))

    def remove(self) -> None:
        """Remove the folder with its content."""
        shutil.rmtree(self.path)

    def forget(self, newest: str, *, keep: int, also: Collection[str | None]) -> None:
        """Remove old checkpoints, and what a killed process left of incomplete ones.

        Args:
            newest: name of the newest complete checkpoint.
            keep: number of last checkpoints to keep.
            also: names of further checkpoints to keep; None entries are ignored.
        """

        def place(name: str) -> tuple[bool, str]:
            return name.startswith("step-"), name

        sweep(self.checkpoints)
        # Checkpoints after the newest complete one are damaged and will be redone; they must not count for
        # `keep`.
        there = [path.name for path in self.checkpoints.iterdir() if path.is_dir()]
        names = [name for name in there if NAME.fullmatch(name) and name.startswith(("sft-", "step-"))]
        names = sorted((name for name in names if place(name) <= place(newest)), key=place)
        for name in names[:-keep]:
            if name not in also:
                remove_checkpoint(self.checkpoints / name)

    def __enter__(self) -> RunFolder:
        """Return the folder; the lock was taken before."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Release the lock."""
        self.unlock()

    def unlock(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_json(self, path: Path, value: dict[str, Any]) -> None:
        """Write JSON to a temporary file and rename it, so that a reader never sees half of it."""
        self.write_text(path, json.dumps(value, indent=1))

    def write_text(self, path: Path, text: str) -> None:
        """Write text to a temporary file and rename it, so that a reader never sees half of it."""
        aside = path.with_name(f".{path.name}.aside")
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)


def _occupied(path: Path) -> str:
    if (path / "recipe.yaml").is_file():
        go_on = f"continue it with: millrace resume {shown(path)}"
        return f"run {shown(path)} exists; choose another name, or {go_on}"
    return f"{shown(path)} exists and is not a run; choose another name, or remove it"


def find_checkpoint(folder: RunFolder, name: str) -> Path:
    """Find a complete checkpoint of a run: `best`, `last`, or a folder's name such as step-000050.

    Raises:
        CheckpointError: it does not exist or is damaged; the message names the existing ones.
    """
    if name == "last":
        newest, refused = newest_checkpoint(folder.checkpoints)
        if refused:
            raise CheckpointError(f"{refused[-1]}; {_another(newest)}")
        if newest is None:
            raise CheckpointError(f"run {shown(folder.path)} has no checkpoint yet")
        return newest
    if name == "best":
        name = best_checkpoint(folder)
    path = folder.checkpoints / name
    if not NAME.fullmatch(name) or not path.is_dir():
        there = (
            sorted(p.name for p in folder.checkpoints.glob("[ws]*")) if folder.checkpoints.is_dir() else []
        )
        raise CheckpointError(
            f"run {shown(folder.path)} has no checkpoint {plain_text(name, 100)}; there are: "
            f"{', '.join(there) or 'none'}"
        )
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_another(newest_checkpoint(folder.checkpoints)[0])}") from None
    return path


def best_checkpoint(folder: RunFolder) -> str:
    """Return the name of a run's best checkpoint, from best.json or else from the newest checkpoint's state.

    Raises:
        CheckpointError: neither contains it.
    """
    reason = ""
    if folder.best.exists():
        try:
            return read_json(folder.best, _Best).checkpoint
        except FileError as error:
            reason = str(error).removesuffix(f"; {RESTORE}")
    newest = newest_checkpoint(folder.checkpoints)[0]
    best = read_state(newest).get("best_checkpoint") if newest is not None else None
    if newest is None or not isinstance(best, str):
        about = f"{reason}, and" if reason else ""
        raise CheckpointError(
            f"{about} run {shown(folder.path)} has no best checkpoint yet; use --checkpoint last".lstrip()
        )
    why = reason or f"{shown(folder.best)} is missing"
    notice(f"{why}; the best checkpoint is {best}, as {newest.name} says")
    return best


def _another(whole: Path | None) -> str:
    """Advice for a damaged checkpoint."""
    if whole is None:
        return "restore it from a copy; no other one is whole"
    return f"{whole.name} is whole: use --checkpoint {whole.name}"


def is_of_checkpoint(folder: Path) -> bool:
    """Whether a model folder is that of a checkpoint, whose tokenizer has the recipe's chat template."""
    return folder.name == "model" and (folder.parent / "state.json").is_file()


def model_folder(path: Path) -> Path:
    """Return the model folder of a run (its best checkpoint), of a checkpoint, or the folder itself.

    Raises:
        CheckpointError: the run has no complete checkpoint.
    """
    if (path / "checkpoints").is_dir():
        return find_checkpoint(RunFolder(path), "best") / "model"
    folder = path / "model" if (path / "model").is_dir() else path
    check_saved_model(folder)
    return folder
