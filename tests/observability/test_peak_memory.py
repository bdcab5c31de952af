from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.observability import peak_memory
from millrace.observability.metrics import Spans
from millrace.observability.peak_memory import PeakMemory

MB = 1 << 20


def phase(peaks: PeakMemory, name: str, num_bytes: int) -> None:
    """A phase that holds so much for a moment."""
    peaks.restart()
    torch.ones(num_bytes, dtype=torch.uint8)
    peaks.note(name)


def test_a_phase_has_its_own_peak_whatever_came_before():
    peaks = PeakMemory(cuda=False)
    for name, size in (("sample", 300), ("train", 20), ("sample", 20)):
        phase(peaks, name, size * MB)
    taken = peaks.take()
    assert list(taken) == ["sample", "train"]
    assert 250 * MB < taken["sample"] - taken["train"] < 350 * MB
    assert peaks.take() == {}


@pytest.mark.parametrize("path", ["/proc/self/gone", "/proc/version"])
def test_where_the_system_keeps_its_record_nothing_is_said(path, monkeypatch):
    monkeypatch.setattr(peak_memory, "_RESTART", (Path(path), "5"))
    peaks = PeakMemory(cuda=False)
    phase(peaks, "train", MB)
    assert peaks.take() == {}


def test_on_a_cuda_device_its_tensors_count(monkeypatch):
    held = [7]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held[0])
    peaks = PeakMemory(cuda=True)
    for size in (5, 3):
        peaks.restart()
        held[0] += size
        peaks.note("train")
    assert peaks.take() == {"train": 5}


def test_spans_tell_it_where_they_begin_and_end():
    said: list[str] = []

    class Told(PeakMemory):
        def restart(self) -> None:
            said.append("restart")

        def note(self, phase: str) -> None:
            said.append(phase)

    spans = Spans(memory=Told(cuda=False))
    with spans("sample"):
        said.append("work")
    assert said == ["restart", "work", "sample"]
