"""Where the time of chosen steps goes, operation by operation: torch's profiler, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def profiled(step: int, chosen: Collection[int], folder: Path) -> Iterator[None]:
    """Profile the block into `step-000003.json` if its step is a chosen one; OSError if it cannot be written.

    The trace is for https://ui.perfetto.dev or chrome://tracing.
    """
    if step not in chosen:
        yield
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / f"step-{step:06d}.json"))
