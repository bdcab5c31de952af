"""`millrace trace`: what every worker of a run did, as a file for a trace viewer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.resume import Run

# Turns of the policy in a file, unless steps are given: some four megabytes.
MOST_TURNS = 20_000
_RANGE = re.compile(r"([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?")

Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where to write it. [default: RUN/trace.json]")
]
Steps = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST:LAST",
        help="Steps of reinforcement, both included, or one. [default: the latest, "
        f"{MOST_TURNS:,} answers at most]",
    ),
]


def trace(run: Run, output: Output = None, steps: Steps = None) -> None:
    """Write what ranks, engines and rewards of a run did as a Chrome trace, a lane for each thing at once.

    The run may still be going on. Open the file in https://ui.perfetto.dev or chrome://tracing.
    """
    from millrace.eventlog.file import check_old
    from millrace.eventlog.log import read_events, read_spans
    from millrace.observability.chrome_trace import chrome_trace, latest_window, window_of, within
    from millrace.observability.files import notice, shown
    from millrace.run.folder import RunFolder, RunFolderError

    folder, chosen = RunFolder.open(run), None if steps is None else _range(steps)
    check_old(folder.events)
    if not folder.events.is_file():
        raise RunFolderError(f"run {shown(run)} has no event log: it has not come to its first batch")
    events = read_events(folder.events, notice)
    if not any(event["kind"] == "dispatch" for event in events):
        raise RunFolderError(f"run {shown(run)}: its event log has no dispatch")
    try:
        window = latest_window(events, MOST_TURNS) if chosen is None else window_of(events, *chosen)
    except ValueError as error:
        raise RunFolderError(f"run {shown(run)}: {error}") from None
    spans = [read_spans(path, notice) for path in folder.spans_of_ranks()]
    told = within(chrome_trace(events, spans), window)
    path = output or folder.path / "trace.json"
    path.write_text(json.dumps(told, separators=(",", ":")), encoding="utf-8")
    slices = [one for one in told["traceEvents"] if one["ph"] == "X"]
    num_workers = len({one["pid"] for one in slices})
    typer.echo(
        f"{shown(path)}: steps {window.first} to {window.last}, {len(slices)} slices of {num_workers} "
        "workers; open it in https://ui.perfetto.dev or chrome://tracing"
    )
    if chosen is None and window.first > 1:
        typer.echo(
            f"steps 1 to {window.first - 1} are left out; choose others with --steps FIRST:LAST, "
            f"or all with --steps 1:{window.num_steps}"
        )


def _range(steps: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(steps)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise typer.BadParameter(f"{steps!r} is no range of steps such as 10:20", param_hint="--steps")
    return first, last
