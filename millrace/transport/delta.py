"""Only the elements that changed, without loss: bits are compared and bits are sent.

Both sides keep the last version that both have proved. Of a weight with E elements of `s` bytes, N of which
have other bits than there, travel: how many changed in each block of 65536 (4 bytes a block), their new
bits (s N bytes) and their places within the block (2 N bytes). Where that is not less than the whole
weight, the whole one travels. In float32 every step moves nearly every element; what gains is bfloat16,
where a small step moves few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from millrace.transport.fingerprint import raw_bytes
from millrace.transport.local import WeightSyncError

BLOCK = 1 << 16
# No name of a weight holds a colon.
CHANGES = "changes:"
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Delta:
    """One side's copy of the weights, on the host, and what it takes to get from them to the next."""

    def __init__(self) -> None:
        """Nothing is held, so the first version travels whole."""
        # None while a version is under way, and after one that failed: then the next travels whole.
        self.version: int | None = None
        self._held: dict[str, Tensor] = {}

    def encode(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What is to travel instead of these weights; set `version` once it is proved."""
        if self.version is None:
            self._held = {}
        self.version = None
        for name, tensor in named_tensors:
            held, there = self._held.get(name), tensor.detach().cpu()
            if held is None or held.shape != there.shape or held.dtype != there.dtype:
                self._held[name] = there.clone(memory_format=torch.contiguous_format)
                yield name, tensor
                continue
            packed = changes(held, there)
            held.copy_(there)
            yield (name, tensor) if packed is None else (CHANGES + name, packed)

    def decode(
        self, named_tensors: Iterable[tuple[str, Tensor]], base: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights whole, from what travelled; set `version` once they are proved.

        Args:
            named_tensors: what `encode` gave.
            base: the version that the sender compared with; None where everything travels whole.

        Yields:
            name and weight; the weight is this side's own copy, so who wants to keep it copies it.

        Raises:
            WeightSyncError: another version than `base` is held, or changes do not fit the weight.
        """
        if base is not None and base != self.version:
            held = "none" if self.version is None else f"version {self.version}"
            raise WeightSyncError(f"changes since version {base} were sent, and {held} is held")
        if base is None:
            self._held = {}
        self.version = None
        for name, tensor in named_tensors:
            plain = name.removeprefix(CHANGES)
            if plain == name:
                self._held[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            elif plain not in self._held:
                raise WeightSyncError(f"changes of weight {plain} were sent, and none is held")
            else:
                apply_changes(self._held[plain], tensor.cpu(), plain)
            yield plain, self._held[plain]


def changes(old: Tensor, new: Tensor) -> Tensor | None:
    """What leads from one tensor to another of the same shape and dtype, uint8 [num_bytes].

    Returns:
        counts of each block (int32), new bits, places within the block (uint16), one after the other; None
        where that is not less than the whole tensor.
    """
    word = WORDS[old.element_size()]
    old_E, new_E = raw_bytes(old).view(word), raw_bytes(new).view(word)
    changed_E = old_E != new_E
    num_changed, num_blocks = int(changed_E.count_nonzero()), -(-old_E.numel() // BLOCK)
    if 4 * num_blocks + (2 + old.element_size()) * num_changed >= old.nbytes:
        return None
    # Of numpy, which takes a third of torch's time where few are set.
    place_N = torch.from_numpy(np.flatnonzero(changed_E.numpy()))
    count_B = torch.bincount(place_N // BLOCK, minlength=num_blocks).int()
    within_N = (place_N % BLOCK).to(torch.uint16)
    return torch.cat([raw_bytes(part) for part in (count_B, new_E[place_N], within_N)])


def apply_changes(held: Tensor, packed: Tensor, name: str) -> None:
    """Write into a contiguous tensor, in place, what `changes` found.

    Raises:
        WeightSyncError: the changes are not of a tensor of this size.
    """
    size, num_blocks = held.element_size(), -(-held.numel() // BLOCK)
    word_E = raw_bytes(held).view(WORDS[size])
    misfit = WeightSyncError(f"the changes of weight {name} do not fit {held.numel()} elements")
    if len(packed) < 4 * num_blocks:
        raise misfit
    # Cloned, since a view of wider words must begin at a multiple of their size.
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
