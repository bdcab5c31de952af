"""Which processes a process has started, also those that `tests.forked` forked for it."""

from __future__ import annotations

from pathlib import Path


def name_of(pid: int) -> str:
    """What a process is, where it was forked here."""
    return _told(pid, "comm").rpartition(" ")[0]


def below(pid: int) -> list[int]:
    """All that a process has started or had forked, and what those have."""
    forked = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _owner(int(path.name)) == str(pid)]
    # A process belongs to the thread that started it.
    tasks = [path.name for path in Path(f"/proc/{pid}/task").glob("*")]
    children = [int(word) for task in tasks for word in _told(pid, f"task/{task}/children").split()]
    return [found for one in (*forked, *children) for found in (one, *below(one))]


def _owner(pid: int) -> str:
    return _told(pid, "comm").strip().rpartition(" ")[2]


def _told(pid: int, name: str) -> str:
    """What the kernel tells of a process; nothing where it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
