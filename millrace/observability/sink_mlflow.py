"""Records to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.observability.sinks import Record, kept_run, missing, tagged


class MlflowSink:
    """One MLflow run named as its folder; a resumed run continues it, by the id in `mlflow_id.txt`.

    Its experiment is the project, its parameters the settings by dotted keys. Where it goes is MLflow's own
    setting (`MLFLOW_TRACKING_URI`). A missing package is a TrackerError.
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
            import mlflow
        except ModuleNotFoundError:
            raise missing("mlflow") from None
        self._mlflow = mlflow
        kept = folder / "mlflow_id.txt"
        known = kept_run(kept, "mlflow")
        mlflow.set_experiment(project)
        if known is not None:
            mlflow.start_run(run_id=known)
            return
        tags = {} if run_group is None else {"tags": {"group": run_group}}
        run = mlflow.start_run(run_name=folder.name, **tags)
        mlflow.log_params(dict(settings))
        kept.write_text(f"{run.info.run_id}\n", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Log every number of the record at its step."""
        step, numbers = tagged(record)
        # MLflow refuses other characters in names: pass@8 is pass_at_8, pass^8 is pass_hat_8.
        names = {name.replace("@", "_at_").replace("^", "_hat_"): value for name, value in numbers.items()}
        self._mlflow.log_metrics(names, step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()
