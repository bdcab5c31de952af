"""A checksum of each weight, to verify that a sampler holds what the trainer sent.

XXH3-128 is several times as fast as SHA-256 and gives the same digest on every machine. It detects accidental
differences: two different tensors have the same digest with probability 2^-128. It is not cryptographic: it
neither resists chosen bytes nor authenticates the sender.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

# Small enough that a copied chunk is still in the CPU cache when it is hashed.
PIECE_BYTES = 1 << 20


def fingerprint(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Compute the digest of each tensor, by name."""
    return {name: digest(tensor) for name, tensor in named_tensors}


def digest(tensor: Tensor, into: Tensor | None = None) -> str:
    """Compute XXH3-128 over dtype, shape and bytes, as 32 hexadecimal digits.

    The bytes are copied to `into`, host memory of uint8 [num_bytes], in the same pass.
    """
    there = tensor.detach().cpu()
    state = xxhash.xxh3_128(f"{there.dtype} {tuple(there.shape)} ".encode())
    held = raw_bytes(there)
    # Without numpy: torch cannot resize a storage that numpy has viewed.
    for begin in range(0, len(held), PIECE_BYTES):
        size, source = min(PIECE_BYTES, len(held) - begin), held.data_ptr() + begin
        if into is not None:
            ctypes.memmove(into.data_ptr() + begin, source, size)
        state.update((ctypes.c_ubyte * size).from_address(source))
    return state.hexdigest()


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, uint8 [num_bytes]; a view if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
