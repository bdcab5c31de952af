"""A checksum of each weight, to prove that a sampler holds what the trainer sent.

XXH3 with 128 bits reads memory several times as fast as SHA-256 can, and gives the same digest on every
machine. It finds accidents: two tensors that differ share a digest by a chance of 2^-128. It is no defence
against somebody who chooses the bytes in order to deceive, and says nothing of who sent them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

# What was just copied is still in the cache when it is read for the digest.
PIECE_BYTES = 1 << 20


def fingerprint(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digest of each tensor, by name."""
    return {name: digest(tensor) for name, tensor in named_tensors}


def digest(tensor: Tensor, into: Tensor | None = None) -> str:
    """XXH3-128 over dtype, shape and bytes, as 32 hexadecimal digits.

    Args:
        tensor: on any device.
        into: memory of the host for as many bytes, uint8 [num_bytes], which is given them on the way.
    """
    there = tensor.detach().cpu()
    state = xxhash.xxh3_128(f"{there.dtype} {tuple(there.shape)} ".encode())
    held = raw_bytes(there)
    # Not by numpy: a storage whose memory it has seen can never be resized again.
    for begin in range(0, len(held), PIECE_BYTES):
        size, source = min(PIECE_BYTES, len(held) - begin), held.data_ptr() + begin
        if into is not None:
            ctypes.memmove(into.data_ptr() + begin, source, size)
        state.update((ctypes.c_ubyte * size).from_address(source))
    return state.hexdigest()


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, uint8 [num_bytes]; a view where it lies contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
