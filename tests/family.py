"""Which processes a process has started, also those that `tests.forked` forked for it."""

from __future__ import annotations

from pathlib import Path


def name_of(pid: int) -> str:
    """What a process is, where it was forked by `tests.forked`."""
    return _words(pid)[0]


def is_running(pid: int) -> bool:
    """Whether a process exists, and has not ended and waits to be collected."""
    state = proc_file(pid, "stat").rpartition(")")[2].split()[:1]
    return bool(state) and state[0] not in "ZX"


def below(pid: int) -> list[int]:
    """All that a process has started or had forked, and what those have."""
    every = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    forked = [one for one in every if _words(one)[1] == str(pid)]
    # A process belongs to the thread that started it.
    tasks = [path.name for path in Path(f"/proc/{pid}/task").glob("*")]
    children = [int(word) for task in tasks for word in proc_file(pid, f"task/{task}/children").split()]
    return [found for one in (*forked, *children) for found in (one, *below(one))]


def proc_file(pid: int, name: str) -> str:
    """A file of a process in /proc; empty where it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _words(pid: int) -> tuple[str, str]:
    """What a process is and which one asked for it; both empty where it is none of ours."""
    told = proc_file(pid, "comm").strip()
    # What a process starts has its name until it executes another program.
    parent = proc_file(pid, "stat").rpartition(")")[2].split()[1:2]
    if not parent or told == proc_file(int(parent[0]), "comm").strip():
        return "", ""
    name, _, owner = told.rpartition(" ")
    return name, owner
