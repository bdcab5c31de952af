"""What a run is at: read from its folder, while it runs or after."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace.orchestration.fleet import Engines
from millrace.orchestration.run_folder import RunFolder, RunFolderError
from millrace.orchestration.watchdog import Wait


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
    waits: tuple[Wait, ...] = ()
    reason: str = ""
    engines: Engines | None = None

    def tree(self) -> dict[str, Any]:
        """A plain tree."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        at = f", {self.stage} step {self.step} of {self.steps}" if self.stage else ""
        by = f" (process {self.pid})" if self.state == "running" else ""
        lines = [f"run {self.run}: {self.state}{by}{at}", *(f"  {wait}" for wait in self.waits)]
        if self.reason:
            lines.append(f"  {self.reason}")
        if self.state in ("interrupted", "failed", "killed"):
            lines.append(f"continue with: millrace resume {self.run}")
        return lines


def read_status(run: str | Path) -> Status:
    """The status of a run.

    Raises:
        RunFolderError: it is not a run folder.
    """
    folder = RunFolder.open(run)
    try:
        folder.lock()
    except RunFolderError:
        busy = True
    else:
        folder.unlock()
        busy = False
    told = _read(folder.status)
    if busy and told is None:
        return Status(str(run), "starting")
    if told is not None:
        waits = tuple(Wait(**{**wait, "on": tuple(wait["on"])}) for wait in told["waits"])
        engines = Engines(**told["engines"]) if busy and "engines" in told else None
        state = "running" if busy else "killed"
        found = Status(str(run), state, told["pid"], waits=waits, engines=engines, **told["at"])
        # A run that stalled ended itself and said so in its summary.
        summary = None if busy else _read(folder.summary)
        if summary is None or summary["status"] != "failed":
            return found
    summary = _read(folder.summary)
    if summary is None:
        return Status(str(run), "killed")
    reason = summary["warnings"][-1] if summary["status"] == "failed" and summary["warnings"] else ""
    return Status(str(run), summary["status"], reason=reason)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tree
