"""A folder for files that are run as machine code: only this user and root can write to it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class FolderNotPrivateError(RuntimeError):
    """Another user could write to the folder or to a file in it; the message names the fix."""


class PrivateFolder:
    """A folder that is made if it is missing, and checked with all folders above it.

    A folder above may be open to others where it is sticky, as `/tmp` is: they cannot replace what is in it.
    """

    def __init__(self, path: Path) -> None:
        """Make the folder.

        Raises:
            FolderNotPrivateError: another user could write to it, or to a folder above it.
            OSError: it cannot be made.
        """
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path.resolve()
        for folder in (self._path, *self._path.parents):
            found = folder.stat()
            is_sticky = folder != self._path and bool(found.st_mode & stat.S_ISVTX)
            self._check(folder, found, is_open=bool(found.st_mode & _BY_OTHERS) and not is_sticky)

    def open(self, name: str) -> int | None:
        """Open a file for reading and return its descriptor, or None if there is no such file.

        Raises:
            FolderNotPrivateError: it is no regular file, or another user could write to it.
        """
        path = self._path / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(descriptor)
            is_open = bool(found.st_mode & _BY_OTHERS) or not stat.S_ISREG(found.st_mode)
            self._check(path, found, is_open=is_open)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, name: str, content: bytes | bytearray) -> None:
        """Write a file for this user alone; it is there whole, or not at all. Hold the lock meanwhile."""
        new = self._path / f"{name}.new"
        new.unlink(missing_ok=True)  # of a process that was killed
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path / name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process holds the lock of this folder, and hold it."""
        with open(self._path / "lock", "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _check(self, path: Path, found: os.stat_result, *, is_open: bool) -> None:
        if is_open:
            problem = "other users can write to it"
        elif found.st_uid not in (0, os.geteuid()):
            problem = f"it belongs to user {found.st_uid}"
        else:
            return
        where = "" if path == self._path else f", since {path} is not private"
        raise FolderNotPrivateError(
            f"machine code cannot be kept in {self._path}{where}: {problem}; run `chmod go-w {path}` if it "
            "is yours, or set XDG_CACHE_HOME to a folder of your own"
        )
