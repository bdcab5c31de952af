"""Results of model trials, cached on disk so that a second load costs nothing.

They are stored next to compiled kernels: in the package's own folder, or, if that is not writable, in the
user's cache folder; `NUMBA_CACHE_DIR` moves both.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch
import transformers

PACKAGE = Path(__file__).resolve().parent.parent
# What a trial runs: with other code the answers are found anew.
TRIED = ("data", "kernels", "models", "inference")


class Verdicts:
    """Trial results by key and `state`, in memory and in the first folder that can be written to, if any."""

    def __init__(self, folders: Iterable[Path], state: str) -> None:
        self._folder = next((folder for folder in folders if _is_writable(folder)), None)
        self._state = state
        self._known: dict[str, str] = {}

    def of(self, key: str, find: Callable[[], str]) -> str:
        """Return the cached problem of a key, or find it; empty for none.

        Only correct results are stored on disk: a problem may be the machine's, such as exhausted memory. A
        damaged file counts as none.
        """
        if key in self._known:
            return self._known[key]
        path, content = self._path(key), json.dumps({"key": key}).encode()
        problem = ""
        if path is None or not _holds(path, content):
            problem = find()
            if path is not None and not problem:
                _write(path, content)
        self._known[key] = problem
        return problem

    def _path(self, key: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(f'{self._state} {key}'.encode()).hexdigest()[:40]}.json"


@cache
def verdicts() -> Verdicts:
    """Return the cache of this version of millrace, torch and transformers."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = (
        [Path(asked) / "trials"]
        if asked
        else [PACKAGE / "__pycache__" / "trials", user / "millrace" / "trials"]
    )
    return Verdicts(folders, f"{torch.__version__} {transformers.__version__} {_code()}")


def _code() -> str:
    digest = hashlib.sha256()
    for part in TRIED:
        for path in sorted((PACKAGE / part).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _write(path: Path, content: bytes) -> None:
    """Write atomically: another process may read the file at any moment."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
