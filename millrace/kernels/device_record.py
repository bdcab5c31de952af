"""Which of the Triton kernels have been checked on a GPU of this type; the others are not used on it.

`millrace doctor --gpu` compares each kernel with torch (`device_checks`) and writes the record: a JSON file
for each type of device, in the user's cache folder. It counts for the versions of torch and Triton and for
the kernels' sources of that check.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch

Kernel = Literal["paged_attention", "token_logprob", "linear_scan"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
MAX_RECORD_BYTES = 1 << 20


def record_path(device_name: str) -> Path:
    """Path of the record of a device type, such as "NVIDIA H100 80GB HBM3"."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return Path(cache_home) / "millrace" / "devices" / f"{name or 'unnamed'}.json"


def versions() -> dict[str, str]:
    """Return what a record counts for: the versions of torch and Triton, and a digest of the kernels."""
    try:
        import triton

        of_triton = str(triton.__version__)
    except ImportError:
        of_triton = "missing"
    return {"torch": torch.__version__, "triton": of_triton, "kernels": _sources()}


def write_record(device_name: str, passed: Mapping[Kernel, bool]) -> Path:
    """Record which kernels passed on a device type, and return the record's path.

    Raises:
        OSError: the cache folder cannot be written to.
    """
    path = record_path(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"device": device_name, **versions(), "passed": {name: passed[name] for name in KERNELS}}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
    checked_kernels.cache_clear()
    return path


@cache
def checked_kernels(device_name: str) -> frozenset[Kernel]:
    """Return the kernels that passed on a device type; none without a valid record of today's versions."""
    path = record_path(device_name)
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return frozenset()
    if not isinstance(record, dict) or record.get("device") != device_name:
        return frozenset()
    passed = record.get("passed")
    if not isinstance(passed, dict) or any(record.get(name) != value for name, value in versions().items()):
        return frozenset()
    return frozenset(name for name in KERNELS if passed.get(name) is True)


def is_checked(kernel: Kernel, device: torch.device) -> bool:
    """Whether a Triton kernel is used on a CUDA device."""
    return kernel in checked_kernels(torch.cuda.get_device_name(device))


def unchecked_note(device: torch.device) -> str:
    """Return a sentence about the kernels that are not used on a device; empty if all are, or on no GPU."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    missing = [kernel for kernel in KERNELS if kernel not in checked_kernels(name)]
    if not missing:
        return ""
    return (
        f"on {name} torch's own operations replace {len(missing)} of millrace's {len(KERNELS)} GPU kernels, "
        f"which have not been checked there ({', '.join(missing)}); millrace doctor --gpu checks them"
    )


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*_triton.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
