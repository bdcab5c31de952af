"""The status of a run, read from its folder, during the run or after it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from millrace.observability.files import FileError, Kind, Shape, notice, read_json
from millrace.observability.measure import held_out_words, measure_words
from millrace.observability.plain import plain_text
from millrace.observability.watchdog import Wait
from millrace.rollout.engine_pool import Engines
from millrace.run.folder import RunFolder


class Best(Shape):
    """The best evaluation of a run."""

    value: float | None = None
    checkpoint: str | None = None


class EvaluationResults(Shape):
    """Results of a run's evaluations.

    Attributes:
        measure: the metric.
        value: at the last evaluation; null before the first.
        best: the best evaluation.
    """

    measure: str
    value: float | None = None
    best: Best = Best()

    def lines(self) -> list[str]:
        """Lines of text for the terminal."""
        found = [] if self.value is None else [f"{self.value:.3f}"]
        if self.best.value is not None:
            found.append(f"best {self.best.value:.3f} ({self.best.checkpoint})")
        words = f"{measure_words(self.measure)}{held_out_words(self.measure)}"
        return [f"  {words}: {', '.join(found)}"] if found else []


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a run.

    Attributes:
        run: the run folder.
        state: `starting`, `running`, `finished`, `interrupted` or `failed` as in its summary, or `killed`: no
            process works on it and it left no summary.
        pid: of the last process of the run; None where unknown.
        stage: sft or reinforcement; empty where unknown.
        step: steps done in the stage.
        steps: of the stage.
        measured: the last and the best evaluation.
        waits: pending waits, each with its waiting component.
        reason: of a failure.
        engines: subprocess engines, while they generate for reinforcement; otherwise None.
    """

    run: str
    state: str
    pid: int | None = None
    stage: str = ""
    step: int = 0
    steps: int = 0
    measured: EvaluationResults | None = None
    waits: tuple[Wait, ...] = ()
    reason: str = ""
    engines: Engines | None = None

    def tree(self) -> dict[str, Any]:
        """Return a dict of plain values."""
        return asdict(self) | {"measured": self.measured and self.measured.model_dump()}

    def lines(self) -> list[str]:
        """Lines of text for the terminal."""
        at = f", {self.stage} step {self.step} of {self.steps}" if self.stage else ""
        by = f" (process {self.pid})" if self.state == "running" else ""
        lines = [f"run {self.run}: {self.state}{by}{at}"]
        lines += self.measured.lines() if self.measured else []
        lines += [f"  {wait}" for wait in self.waits]
        if self.reason:
            lines.append(f"  {self.reason}")
        if self.state in ("interrupted", "failed", "killed"):
            lines.append(f"continue with: millrace resume {self.run}")
        return [plain_text(line, 2000) for line in lines]


def read_status(run: str | Path) -> Status:
    """Read the status of a run.

    Raises:
        RunFolderError: the path is no run folder.
    """
    folder = RunFolder.open(run)
    busy = folder.is_busy()
    file = _read(folder.status, _StatusFile)
    if busy and file is None:
        return Status(str(run), "running" if folder.status.exists() else "starting")
    if file is not None:
        state, engines = "running" if busy else "killed", file.engines if busy else None
        found = Status(str(run), state, file.pid, waits=file.waits, engines=engines, **dict(file.at))
        # A stalled run ends itself and records the reason in its summary.
        summary = None if busy else _read(folder.summary, Summary)
        if summary is None or summary.status != "failed":
            return found
    summary = _read(folder.summary, Summary)
    if summary is None:
        return Status(str(run), "killed")
    reason = summary.warnings[-1] if summary.status == "failed" and summary.warnings else ""
    best = Best(value=summary.eval_best, checkpoint=summary.best_checkpoint)
    measured = EvaluationResults(measure=summary.measure, value=summary.eval_after, best=best)
    return Status(str(run), summary.status, measured=measured, reason=reason)


class Summary(Shape):
    """The fields read from `summary.json`, which `progress.RunReport` is written to."""

    status: Literal["finished", "interrupted", "failed"]
    measure: str = ""
    eval_after: float | None = None
    eval_best: float | None = None
    best_checkpoint: str | None = None
    warnings: list[str] = []
    versions: dict[str, str] = {}


class _At(Shape):
    stage: str
    step: int
    steps: int
    measured: EvaluationResults | None = None


class _StatusFile(Shape):
    """Content of `status.json`."""

    pid: int
    at: _At
    waits: tuple[Wait, ...]
    engines: Engines | None = None


def read_summary(path: Path) -> Summary:
    """Read the summary of a run.

    Raises:
        FileError: the file is damaged.
    """
    return read_json(path, Summary, mend="remove it")


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    """Read a JSON file; None where it does not exist, or is damaged, with a notice."""
    try:
        return read_json(path, kind, mend="it is passed over", finite=False) if path.exists() else None
    except FileError as error:
        notice(str(error))
        return None
