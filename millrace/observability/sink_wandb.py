"""Records to Weights & Biases."""

from __future__ import annotations

from millrace.observability.sinks import Record, TrackedRun, tagged


class WandbSink:
    """One Weights & Biases run; a missing package is a TrackerError."""

    def __init__(self, tracked: TrackedRun) -> None:
        self._run = tracked.package("wandb").init(
            project=tracked.project,
            group=tracked.group,
            name=tracked.folder.name,
            dir=str(tracked.folder),
            config=dict(tracked.settings),
            id=tracked.known_id("wandb"),
            resume="allow",
        )
        tracked.keep_id("wandb", self._run.id)
        self._defined: set[str] = set()

    def write(self, record: Record) -> None:
        """Log every number of the record against the step of its own stage.

        The steps of a run are not one rising count (SFT has its own), and Weights & Biases drops what
        is logged under a step already passed, so the step travels as a metric.
        """
        step, numbers = tagged(record)
        axis = f"step/{record.get('during', record['stage'])}"
        for tag in numbers.keys() - self._defined:
            self._run.define_metric(tag, step_metric=axis)
        self._defined |= numbers.keys()
        self._run.log({axis: step, **numbers})

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()
