"""Records to MLflow."""

from __future__ import annotations

from millrace.observability.sinks import Record, TrackedRun, tagged


class MlflowSink:
    """One MLflow run.

    Its experiment is the project, its parameters the settings by dotted keys. Where it goes is MLflow's own
    setting (`MLFLOW_TRACKING_URI`). A missing package is a TrackerError.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        self._mlflow = mlflow = tracked.package("mlflow")
        known = tracked.known_id("mlflow")
        mlflow.set_experiment(tracked.project)
        if known is not None:
            mlflow.start_run(run_id=known)
            return
        tags = {} if tracked.group is None else {"tags": {"group": tracked.group}}
        run = mlflow.start_run(run_name=tracked.folder.name, **tags)
        mlflow.log_params(dict(tracked.settings))
        tracked.keep_id("mlflow", run.info.run_id)

    def write(self, record: Record) -> None:
        """Log every number of the record at its step."""
        step, numbers = tagged(record)
        # MLflow refuses other characters in names: pass@8 is pass_at_8, pass^8 is pass_hat_8.
        names = {name.replace("@", "_at_").replace("^", "_hat_"): value for name, value in numbers.items()}
        self._mlflow.log_metrics(names, step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()
