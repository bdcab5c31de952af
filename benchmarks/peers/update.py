"""The process of one side of train_step.py: for each line of its input it makes an update."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Protocol

from serve import answer, peak_bytes


class Side(Protocol):
    """What each side does."""

    def step(self) -> tuple[float, float]:
        """Forward, backward and optimizer step over the whole batch: its loss, and the gradient's norm."""
        ...


def serve(make: Callable[[str, str, int], Side], packages: tuple[str, ...]) -> None:
    """Make a step for each line of the input, and answer with its seconds, loss and gradient norm.

    Args:
        make: builds the side from a model's folder, its dtype and the number of threads.
        packages: whose versions are told first.
    """
    folder, dtype, threads = sys.argv[1:4]
    side = make(folder, dtype, int(threads))
    answer({name: metadata.version(name) for name in packages})
    for _ in sys.stdin:
        start = time.perf_counter()
        loss, norm = side.step()
        took = time.perf_counter() - start
        answer({"seconds": took, "loss": loss, "norm": norm, "peak_bytes": peak_bytes()})
