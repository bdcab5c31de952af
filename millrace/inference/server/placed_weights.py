"""Weights at given places of a file, or of the shared memory of a trainer on this machine."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.transport.fingerprint import digest
from millrace.transport.weight_update import WeightSyncError

# An anonymous file of another process of the same user.
SHARED = re.compile(r"/proc/[1-9]\d{0,9}/fd/\d{1,6}")
_MEMORY = "/memfd:millrace-weights"


def read_placed(
    path: str, places: Mapping[str, Sequence[Any]], fingerprint: Mapping[str, str], root: Path | None
) -> list[tuple[str, Tensor]]:
    """Map the weights of a file, and verify each of them. The tensors are views of the file's pages.

    Args:
        path: shared memory (`SHARED`), or a file below `root`.
        places: dtype, shape and first byte of each weight.
        fingerprint: expected checksum of each weight.
        root: see `path`.

    Raises:
        WeightSyncError: the file is not readable or too short, a place is invalid, or a checksum differs.
    """
    is_shared = SHARED.fullmatch(path) is not None
    try:
        if is_shared and not os.readlink(path).startswith(_MEMORY):
            raise WeightSyncError(f"{path} is not the shared memory of a trainer")
        with open(path if is_shared or root is None else root / path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Private: torch takes writable memory only.
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"{path} cannot be opened here ({error}); trainer and server must be on one machine, or share "
            "the folder engine.weights_folder"
        ) from None
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if places.keys() != fingerprint.keys():
        odd = min(places.keys() ^ fingerprint.keys())
        raise WeightSyncError(f"weight {odd} has no place or no checksum")
    tensors = []
    for name, place in places.items():
        tensor = _placed(whole, name, place)
        if digest(tensor) != fingerprint[name]:
            raise WeightSyncError(f"weight {name} did not arrive with the bits that were sent")
        tensors.append((name, tensor))
    return tensors


def _placed(whole: Tensor, name: str, place: Sequence[Any]) -> Tensor:
    match place:
        case [str(word), [*shape], int(begin)] if isinstance(getattr(torch, word, None), torch.dtype):
            dtype: torch.dtype = getattr(torch, word)
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            if begin % dtype.itemsize == 0 and begin >= 0 and end <= len(whole):
                return whole[begin:end].view(dtype).reshape(shape)
    raise WeightSyncError(f"weight {name} has the place {place}, which is not in the {len(whole)} bytes")
