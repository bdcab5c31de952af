"""bubblewrap: whether it works on this system, and the arguments that every use of it shares."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache

# Timeout in seconds of `bwrap ... true`, which takes about 0.01 s.
_PROBE_S = 10.0
# No capability, own namespaces of users, processes, network and IPC, killed with the parent.
ISOLATION = ("--unshare-all", "--die-with-parent", "--cap-drop", "ALL")
# Read-only: root without capabilities may still write the host's settings in /proc/sys, such as
# kernel.core_pattern, which names a program that the kernel runs as root.
PROC = ("--proc", "/proc", "--remount-ro", "/proc")
_NO_NAMESPACES = ("--unshare-user", "--disable-userns")


@lru_cache(maxsize=1)
def find_bubblewrap() -> str | None:
    """Return the path of bubblewrap if it is installed and works on this system, else None."""
    path = shutil.which("bwrap")
    return path if path is not None and _works(path, ()) else None


@lru_cache(maxsize=1)
def without_user_namespaces(bubblewrap: str) -> tuple[str, ...]:
    """Return the arguments that forbid further user namespaces; none before version 0.8, or set-uid."""
    return _NO_NAMESPACES if _works(bubblewrap, _NO_NAMESPACES) else ()


def _works(path: str, arguments: Sequence[str]) -> bool:
    mounts = ["--ro-bind", "/", "/", "--dev", "/dev", *PROC, "--tmpfs", "/run"]
    try:
        found = subprocess.run(
            [path, *ISOLATION, *arguments, *mounts, "true"],
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0
