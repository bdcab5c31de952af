"""What a sandbox does: run a program under limits, and report how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

MIB = 1 << 20
# How a program ended: by itself or a signal of its own, or at a limit.
Ended = Literal["exit", "timeout", "cpu", "memory", "output", "processes", "files"]


class SandboxError(RuntimeError):
    """A sandbox cannot be opened, is gone, or cannot do what was asked; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """RunLimits of one run, and of the folder, which is of one size while the sandbox is open.

    `cpu_s` and `file_bytes` are for each process and file. `memory_bytes` is for each process, and for all of
    them where they are measured, every 20 ms; so are `num_processes`, threads included. `output_bytes` counts
    standard output and standard error together.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MIB
    num_processes: int = 32
    output_bytes: int = MIB
    file_bytes: int = 16 * MIB
    folder_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        """Raise ValueError for a limit that is not positive."""
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; a limit is above 0")


@dataclass(frozen=True, slots=True)
class Execution:
    """What became of a program.

    Attributes:
        stdout: at most `RunLimits.output_bytes`; bytes that are no UTF-8 are replaced.
        stderr: counted with stdout.
        exit_code: negative where a signal ended it, as in `subprocess`.
        ended: `exit`, or the limit that it was stopped at.
        seconds: wall time.
        note: one sentence on the limit; empty after an `exit`.
    """

    stdout: str
    stderr: str
    exit_code: int
    ended: Ended
    seconds: float
    note: str


def limit_note(ended: Ended, limits: RunLimits) -> str:
    """Return the sentence on a limit, for a user or a model; empty for `exit`."""
    return {
        "exit": "",
        "timeout": f"stopped after {limits.wall_s:g} s",
        "cpu": f"stopped after {limits.cpu_s:g} s of processor time",
        "memory": f"needed more than {limits.memory_bytes:,} bytes of memory",
        "output": f"printed more than {limits.output_bytes:,} bytes; the rest is cut off",
        "processes": f"started more than {limits.num_processes} processes and threads",
        "files": f"made too many files, or more than {limits.folder_bytes:,} bytes of them",
    }[ended]


class Sandbox(Protocol):
    """Runs programs one after another; each is over, with all its processes, when `run` returns.

    `run`, `write`, `read` and `clear` raise SandboxError if the sandbox cannot do that or is gone.
    """

    def run(
        self, program: str | Sequence[str], stdin: str = "", limits: RunLimits | None = None
    ) -> Execution:
        """Run Python code (a text) or a command line (a list) in the work folder, which later runs see."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file, relative to the work folder; its folders are made."""
        ...

    def read(self, path: str) -> bytes:
        """Read a file of at most `RunLimits.file_bytes`, relative to the work folder."""
        ...

    def clear(self) -> None:
        """Empty the work folder; what runs later finds nothing of earlier runs."""
        ...

    def close(self) -> None:
        """End everything that runs in it, and remove its files."""
        ...
