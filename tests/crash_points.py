"""Crash points: a process of a test kills itself just before a durable effect, chosen by name or number.

A durable effect is a call after which another process finds something else below a folder: a file is made,
written, appended to, truncated, renamed or removed, or a folder is made or removed. A file that is written
has two: before it is opened, and when it is there with nothing or half of it in it. An undisturbed run logs
its effects, and a run that is to die at one of them dies there, however fast the machine is.

What dies is the process, as by SIGKILL, and not the machine. So whatever was handed to the operating system
stays, and fsync is no effect.

Install it only in a process that the test starts, since audit hooks cannot be removed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.family import below

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LEFT = "left behind:"
ROOT = Path(__file__).parents[1]
VARIABLE = "TESTS_CRASH_POINT"


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """What a process is to log, and where it is to die.

    Attributes:
        folder: below which effects count.
        log: file outside of the folder, to which each effect is appended, one a line, before it happens.
        before: name of an effect as it stands in the log, or its number from 1; None for no death.
        ignoring: names of files that are no effects, such as those written by the clock.
        steps: whether optimizer steps and collectives count as well, for ranks that write little.
    """

    folder: Path
    log: Path
    before: str | int | None = None
    ignoring: tuple[str, ...] = ()
    steps: bool = False


def effects_of(log: Path) -> list[str]:
    """The effects that processes logged, in order; the last one of a process that died did not happen."""
    return [line for line in _lines(log) if not line.startswith(LEFT)]


def left_behind(log: Path) -> list[int]:
    """The processes below one that died which were running then."""
    found = [line.removeprefix(LEFT).split() for line in _lines(log) if line.startswith(LEFT)]
    return [int(process) for line in found for process in line]


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.is_file() else []


def install(point: CrashPoint) -> None:
    """Log the effects of this process from here on, and kill it at the crash point.

    Writers in other languages cause no audit event, so those that are used here are wrapped.
    """
    import pyarrow.parquet
    import safetensors.numpy
    import safetensors.torch

    effects = _Effects(point)
    for module, name in (
        (safetensors.torch, "serialize_file"),
        (safetensors.numpy, "serialize_file"),
        (pyarrow.parquet, "write_table"),
    ):
        setattr(module, name, partial(effects.write, getattr(module, name)))
    opened = Path.open

    def opening(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = opened(self, mode, *args, **options)
        name = effects.name(self) if "a" in mode else None
        return file if name is None else _Appended(file, f"append {name}", effects)

    Path.open = opening  # type: ignore[method-assign]
    if point.steps:
        _count_steps(effects)
    sys.addaudithook(effects.hear)


def environment_of_ranks(site: Path, point: CrashPoint, victim: int | None = None) -> dict[str, str]:
    """Variables with which `millrace train` has each rank log its effects, and one of them die.

    Args:
        site: folder, made here, for a `sitecustomize` module, which Python imports when it starts.
        point: of the victim; each rank logs to a file of its own, see `log_of_rank`.
        victim: the rank that is to die.
    """
    site.mkdir(exist_ok=True)
    text = "from tests.crash_points import install_in_rank\n\ninstall_in_rank()\n"
    (site / "sitecustomize.py").write_text(text, encoding="utf-8")
    told = asdict(point) | {"folder": str(point.folder), "log": str(point.log), "victim": victim}
    return {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", VARIABLE: json.dumps(told)}


def log_of_rank(log: Path, rank: int) -> Path:
    """The file to which a rank logs."""
    return log.with_name(f"{log.name}-{rank}")


def install_in_rank() -> None:
    """Install the crash point that the environment names, if this process is a rank."""
    told, rank = os.environ.get(VARIABLE), os.environ.get("RANK")
    if told is None or rank is None or "millrace.cli.main" not in sys.orig_argv:
        return
    tree = json.loads(told)
    victim = tree.pop("victim")
    log, ignoring = log_of_rank(Path(tree.pop("log")), int(rank)), tuple(tree.pop("ignoring"))
    point = CrashPoint(Path(tree.pop("folder")), log, ignoring=ignoring, **tree)
    install(point if int(rank) == victim else replace(point, before=None))


def _count_steps(effects: _Effects) -> None:
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: effects.reach("optimizer step"))

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def reaching(*args: Any, **options: Any) -> Any:
            effects.reach(name)
            return original(*args, **options)

        return reaching

    for name in ("all_gather", "all_reduce", "broadcast"):
        setattr(dist, name, counted(name, getattr(dist, name)))


class _Effects:
    """Logs effects; kills the process at one of them."""

    def __init__(self, point: CrashPoint) -> None:
        self._point = point
        self._folder = os.path.abspath(point.folder)
        self._log = os.open(point.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count: Counter[str] = Counter()
        # What a thread does in here, such as removing garbage, may be an effect again.
        self._lock = threading.RLock()
        self._dying = False

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Handle an audit event, which comes before the call that it is about."""
        if self._dying:
            return
        match event, *args:
            case "open", path, _, int(flags) if flags & WRITING:
                self._open(path, flags)
            case "os.rename", source, target, source_folder, target_folder:
                old, new = self.name(source, source_folder), self.name(target, target_folder)
                if old is not None or new is not None:
                    self.reach(f"rename {old or source} to {new or target}")
            case "os.mkdir", path, _, folder:
                self._change("mkdir", path, folder, when=False)
            case "os.remove" | "os.rmdir", path, folder:
                self._change(event.removeprefix("os."), path, folder)
            case "os.link" | "os.symlink", _, path, *folders:
                self._change(event.removeprefix("os."), path, folders[-1], when=False)
            case "os.truncate", path, _:
                self._change("truncate", path, -1)

    def name(self, path: Any, folder: int = -1) -> str | None:
        """A path as it is called in the folder; None where it does not lie there or is ignored."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.fsdecode(path)
        if folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        if path != self._folder and not path.startswith(self._folder + os.sep):
            return None
        path = os.path.relpath(path, self._folder)
        return None if path in self._point.ignoring else path

    def write(self, original: Callable[..., Any], what: Any, path: Any, *args: Any, **options: Any) -> Any:
        """Write a file as a whole by a function that causes no audit event."""

        def half() -> None:
            original(what, path, *args, **options)
            os.truncate(path, os.path.getsize(path) // 2)

        if (name := self.name(path)) is not None:
            self.reach(f"open {name}")
            self.reach(f"write {name}", half)
        return original(what, path, *args, **options)

    def reach(self, effect: str, half: Callable[[], None] | None = None) -> None:
        """An effect is about to happen; a process that dies here leaves half of it, where there is such."""
        with self._lock:
            self._count[effect] += 1
            if (count := self._count[effect]) > 1:
                effect = f"{effect} ({count})"
            os.write(self._log, f"{effect}\n".encode())
            if self._point.before not in (effect, self._count.total()):
                return
            self._dying = True
            if half is not None:
                half()
            os.write(self._log, f"{LEFT} {' '.join(map(str, below(os.getpid())))}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def _open(self, path: Any, flags: int) -> None:
        # A descriptor was opened by its name before.
        name = None if isinstance(path, int) else self.name(path)
        if name is None:
            return
        self.reach(f"open {name}")
        if flags & (os.O_CREAT | os.O_TRUNC) and not flags & os.O_APPEND:
            self.reach(f"write {name}", lambda: os.close(os.open(path, flags, 0o600)))

    def _change(self, what: str, path: Any, folder: int, *, when: bool = True) -> None:
        """A change of a path, unless it will fail because something is there or not there."""
        name = self.name(path, folder)
        if name is None:
            return
        whole = os.path.normpath(os.path.join(self._folder, name))
        if os.path.lexists(whole) == when and os.path.isdir(os.path.dirname(whole)):
            self.reach(f"{what} {name}")


class _Appended:
    """A file that is appended to; each flush is an effect, of which a process that dies leaves the half."""

    def __init__(self, file: Any, effect: str, effects: _Effects) -> None:
        self._file, self._effect, self._effects = file, effect, effects
        self._pending = b""

    def write(self, data: bytes) -> int:
        self._pending += data
        return len(data)

    def flush(self) -> None:
        pending, self._pending = self._pending, b""
        if pending:
            self._effects.reach(self._effect, lambda: self._append(pending[: len(pending) // 2]))
            self._append(pending)

    def tell(self) -> int:
        self.flush()
        return self._file.tell()

    def seek(self, *to: int) -> int:
        self.flush()
        return self._file.seek(*to)

    def truncate(self, size: int) -> int:
        self.flush()
        if size < os.fstat(self._file.fileno()).st_size:
            self._effects.reach(self._effect.replace("append", "truncate", 1))
        return self._file.truncate(size)

    def close(self) -> None:
        # No effect: whether anything is pending at the end is up to the clock.
        self._append(self._pending)
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
