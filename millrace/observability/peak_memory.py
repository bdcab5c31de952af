"""Peak memory of each phase of a step."""

from __future__ import annotations

import re
from pathlib import Path

import torch

# Writing this value to this file resets Linux's peak resident set size.
_RESTART = Path("/proc/self/clear_refs"), "5"
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Peak memory by phase: tensors on a CUDA device, or the resident set size of the process on a CPU.

    Where the system cannot reset its peak (no Linux, or not permitted), no peaks are recorded, since the peak
    of the whole process is not that of a phase.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._peaks: dict[str, int] = {}
        self._known = False

    def restart(self) -> None:
        """Reset the peak at the start of a phase."""
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
        """Record the peak at the end of a phase; repeated phases keep their highest peak."""
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
        """Return and clear the peak bytes by phase since the last call."""
        taken, self._peaks = self._peaks, {}
        return taken
