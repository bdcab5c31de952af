"""Lossless delta encoding of weight updates: only elements with changed bits are sent.

Both sides hold the previous version. Let a weight have E elements of `s` bytes, N of them with changed bits.
The delta holds the number of changes per block of 65536 elements (4 bytes per block), the new bits (s N
bytes) and the indices within the block (2 N bytes). If that is not smaller than the weight, the complete
weight is sent. In float32 every step changes nearly every element. The gain is in bfloat16, where a small
step changes few.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.transport.fingerprint import raw_bytes
from millrace.transport.weight_update import WeightSyncError

BLOCK = 1 << 16
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(old: Tensor, new: Tensor) -> Tensor | None:
    """Encode the changes between two CPU tensors of the same shape and dtype.

    Returns:
        uint8 [num_bytes]: counts per block (int32), new bits and indices within the block (uint16),
        concatenated. None if that is not smaller than the tensor.
    """
    word = WORDS[old.element_size()]
    old_E, new_E = raw_bytes(old).view(word), raw_bytes(new).view(word)
    changed_E = old_E != new_E
    num_changed, num_blocks = int(changed_E.count_nonzero()), -(-old_E.numel() // BLOCK)
    if 4 * num_blocks + (2 + old.element_size()) * num_changed >= old.nbytes:
        return None
    # numpy takes a third of torch's time for few set elements.
    place_N = torch.from_numpy(np.flatnonzero(changed_E.numpy()))
    count_B = torch.bincount(place_N // BLOCK, minlength=num_blocks).int()
    within_N = (place_N % BLOCK).to(torch.uint16)
    return torch.cat([raw_bytes(part) for part in (count_B, new_E[place_N], within_N)])


def apply_changes(held: Tensor, packed: Tensor, name: str) -> None:
    """Apply the result of `changes` to the previous tensor, which is contiguous, in place.

    Raises:
        WeightSyncError: the changes do not fit a tensor of this size.
    """
    size, num_blocks = held.element_size(), -(-held.numel() // BLOCK)
    word_E = raw_bytes(held).view(WORDS[size])
    misfit = WeightSyncError(f"the changes of weight {name} do not fit {held.numel()} elements")
    if len(packed) < 4 * num_blocks:
        raise misfit
    # Cloned, because a view with a wider dtype needs an aligned start.
    count_B = packed[: 4 * num_blocks].clone().view(torch.int32).long()
    num_changed = int(count_B.sum())
    if bool((count_B < 0).any()) or len(packed) != 4 * num_blocks + (2 + size) * num_changed:
        raise misfit
    bits, within = packed[4 * num_blocks :].split([size * num_changed, 2 * num_changed])
    start_N = torch.repeat_interleave(torch.arange(num_blocks) * BLOCK, count_B)
    place_N = start_N + within.clone().view(torch.uint16).long()
    if bool((place_N >= held.numel()).any()):
        raise misfit
    word_E[place_N] = bits.clone().view(word_E.dtype)
