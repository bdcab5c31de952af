"""Records to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.observability.sinks import Record, kept_run, missing, tagged


class WandbSink:
    """One Weights & Biases run named as its folder; a resumed run continues it, by the id in `wandb_id.txt`.

    A missing package is a TrackerError.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        project: str = "millrace",
        run_group: str | None = None,
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise missing("wandb") from None
        kept = folder / "wandb_id.txt"
        self._run = wandb.init(
            project=project,
            group=run_group,
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            id=kept_run(kept, "wandb"),
            resume="allow",
        )
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")
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
