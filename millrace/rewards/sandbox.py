"""The sandbox of a reward worker: its environment variables, and its bubblewrap command line."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.processes.bubblewrap import ISOLATION, PROC

_GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
_NAMES = frozenset(
    name
    for line in (
        "PATH HOME USER LOGNAME LANG LANGUAGE TZ LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX",
        "SSL_CERT_FILE SSL_CERT_DIR CUDA_VISIBLE_DEVICES CUDA_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM",
    )
    for name in line.split()
)
_FAMILIES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "XDG_")
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a reward may do beside computing and reading files.

    `env_vars` are passed on in addition to harmless ones, `writable` are absolute paths of folders,
    `memory_bytes` limits each process and `file_bytes` each file.
    """

    network: bool = False
    env_vars: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    memory_bytes: int = 2 << 30
    file_bytes: int = 0


FUNCTION_PERMISSIONS = Permissions(memory_bytes=4 << 30, file_bytes=1 << 30)


def visible_environment(environment: Mapping[str, str], env_vars: Sequence[str]) -> dict[str, str]:
    """Select the environment variables of a worker: those in `env_vars`, and harmless ones such as PATH."""
    return {
        name: value
        for name, value in environment.items()
        if name in env_vars
        or (
            (name in _NAMES or name.startswith(_FAMILIES))
            and not any(word in name.upper() for word in _SECRETS)
        )
    }


def sandboxed(bubblewrap: str, command: Sequence[str], permissions: Permissions) -> list[str]:
    """Build a command line that runs a command in its own namespaces.

    Apart from its permissions, it sees files read-only and only its own processes, has no network, no sockets
    in /run and no capabilities, and is killed with its parent.
    """
    # The order matters: later mounts cover earlier ones.
    mounts = ["--ro-bind", "/", "/", "--dev", "/dev", *PROC, "--tmpfs", "/run"]
    for device in (path for pattern in _GPUS for path in sorted(glob.glob(pattern))):
        mounts += ["--dev-bind-try", device, device]
    if permissions.network:
        # /etc/resolv.conf is often a symbolic link into this folder.
        mounts += ["--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve"]
    for folder in permissions.writable:
        mounts += ["--bind", folder, folder]
    shared = ["--share-net"] if permissions.network else []
    return [bubblewrap, *ISOLATION, *shared, *mounts, "--chdir", os.getcwd(), "--", *command]
