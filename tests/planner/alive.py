"""Bytes of tensors that are alive, and the most there ever were: what a device would have had to hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts the memory of every tensor that an operation makes while the mode is on.

    Attributes:
        num_bytes: alive now.
        peak: the most at once.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """The memory of `known` is not counted."""
        super().__init__()
        self.num_bytes = self.peak = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._held:
            return
        self._held.add(storage._cdata)
        self.num_bytes += storage.nbytes()
        self.peak = max(self.peak, self.num_bytes)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, num_bytes: int) -> None:
        self._held.discard(key)
        self.num_bytes -= num_bytes
