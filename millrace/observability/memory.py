"""The most memory that each phase of a step takes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

# Linux starts its own record of the peak over where this is written there.
_RESTART = Path("/proc/self/clear_refs"), "5"
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Peaks by phase: of tensors on a CUDA device, or on a CPU of what is resident of the process.

    Where the system cannot start its record over (no Linux, or not permitted), there are no peaks: that of
    the whole process would say nothing of a phase.
    """

    def __init__(self, *, cuda: bool) -> None:
        """Nothing is known yet.

        Args:
            cuda: whether the run computes on a CUDA device.
        """
        self._cuda = cuda
        self._peaks: dict[str, int] = {}
        self._known = False

    def restart(self) -> None:
        """A phase begins."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._known = True
            return
        path, word = _RESTART
        try:
            path.write_text(word)
            self._known = True
        except OSError:
            self._known = False

    def note(self, phase: str) -> None:
        """It ends; of several of one name the highest peak counts."""
        if not self._known:
            return
        if self._cuda:
            peak = torch.cuda.max_memory_allocated()
        else:
            found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.M)
            assert found is not None
            peak = int(found[1]) * 1024
        self._peaks[phase] = max(peak, self._peaks.get(phase, 0))

    def take(self) -> dict[str, int]:
        """Bytes by phase since the last call."""
        taken, self._peaks = self._peaks, {}
        return taken
