"""Where the time of chosen steps goes, operation by operation: torch's profiler, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Profiler:
    """Profiles steps into `step-000003.json`, for https://ui.perfetto.dev or chrome://tracing."""

    def __init__(self, steps: Collection[int], folder: Path) -> None:
        self._steps, self._folder = frozenset(steps), folder

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Record the block if it is one of the steps; OSError if the trace cannot be written."""
        if step not in self._steps:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._folder / f"step-{step:06d}.json"))
