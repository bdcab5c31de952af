"""Records to TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.observability.sinks import Record, tagged


class TensorBoardSink:
    """Scalars for TensorBoard, one TensorBoard run for each stage, because each counts its own steps.

    `purge_step` is the first step that a resumed run will write again: what TensorBoard holds of the resumed
    stage from there on, and of any later stage, is hidden. None for a fresh run.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = folder
        self._purge_step = purge_step
        self._writers: dict[str, Any] = {}

    def write(self, record: Record) -> None:
        """Keep every number of the record under its tag."""
        stage = str(record.get("during", record["stage"]))
        if stage not in self._writers:
            self._writers[stage] = self._make(str(self._folder / stage), purge_step=self._purge_step)
            # A stage that opens after the resumed one starts over: nothing it wrote before may stay.
            self._purge_step = None if self._purge_step is None else 0
        writer = self._writers[stage]
        step, numbers = tagged(record)
        for tag, value in numbers.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    def close(self) -> None:
        """Close the event files."""
        for writer in self._writers.values():
            writer.close()
