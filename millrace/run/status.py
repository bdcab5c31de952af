"""What a run is at: read from its folder, while it runs or after."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from millrace.observability.files import FileError, Kind, Shape, notice, read_json
from millrace.observability.measure import measure_words
from millrace.observability.plain import plain_text
from millrace.observability.watchdog import Wait
from millrace.rollout.engine_pool import Engines
from millrace.run.folder import RunFolder


class Best(Shape):
    """The best evaluation of a run."""

    value: float | None = None
    checkpoint: str | None = None


class Measured(Shape):
    """What a run's evaluations came to.

    Attributes:
        measure: the metric.
        value: at the last one; null where none was made.
        best: the best one.
    """

    measure: str
    value: float | None = None
    best: Best = Best()

    def lines(self) -> list[str]:
        """For people."""
        found = [] if self.value is None else [f"{self.value:.3f}"]
        if self.best.value is not None:
            found.append(f"best {self.best.value:.3f} ({self.best.checkpoint})")
        return [f"  {measure_words(self.measure)} on held-out prompts: {', '.join(found)}"] if found else []


@dataclass(frozen=True, slots=True)
class Status:
    """What a run is at.

    Attributes:
        run: its folder.
        state: `starting`, `running`, `finished`, `interrupted` or `failed` as its summary says, or `killed`:
            nobody works on it and nobody said why.
        pid: of the process that works on it, or did; None where nobody said.
        stage: warmup or reinforcement; empty where nobody said.
        step: steps done in the stage.
        steps: of the stage.
        measured: what the last evaluation came to, and the best one.
        waits: who waits for what.
        reason: why it failed.
        engines: in processes of their own, while they draw for reinforcement; otherwise None.
    """

    run: str
    state: str
    pid: int | None = None
    stage: str = ""
    step: int = 0
    steps: int = 0
    measured: Measured | None = None
    waits: tuple[Wait, ...] = ()
    reason: str = ""
    engines: Engines | None = None

    def tree(self) -> dict[str, Any]:
        """A plain tree."""
        return asdict(self) | {"measured": self.measured and self.measured.model_dump()}

    def lines(self) -> list[str]:
        """For people."""
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
    """The status of a run.

    Raises:
        RunFolderError: it is not a run folder.
    """
    folder = RunFolder.open(run)
    busy = folder.is_busy()
    told = _read(folder.status, _Told)
    if busy and told is None:
        return Status(str(run), "running" if folder.status.exists() else "starting")
    if told is not None:
        state, engines = "running" if busy else "killed", told.engines if busy else None
        found = Status(str(run), state, told.pid, waits=told.waits, engines=engines, **dict(told.at))
        # A run that stalled ended itself and said so in its summary.
        summary = None if busy else _read(folder.summary, Summary)
        if summary is None or summary.status != "failed":
            return found
    summary = _read(folder.summary, Summary)
    if summary is None:
        return Status(str(run), "killed")
    reason = summary.warnings[-1] if summary.status == "failed" and summary.warnings else ""
    best = Best(value=summary.eval_best, checkpoint=summary.best_checkpoint)
    measured = Measured(measure=summary.measure, value=summary.eval_after, best=best)
    return Status(str(run), summary.status, measured=measured, reason=reason)


class Summary(Shape):
    """What is read of `summary.json`, which `progress.RunReport` is written to."""

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
    measured: Measured | None = None


class _Told(Shape):
    """What `status.json` says."""

    pid: int
    at: _At
    waits: tuple[Wait, ...]
    engines: Engines | None = None


def read_summary(path: Path) -> Summary:
    """What a run came to.

    Raises:
        FileError: the file is damaged.
    """
    return read_json(path, Summary, mend="remove it")


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    """What a file says; None where it is not there, or damaged, which is said."""
    try:
        return read_json(path, kind, mend="it is passed over", finite=False) if path.exists() else None
    except FileError as error:
        notice(str(error))
        return None
