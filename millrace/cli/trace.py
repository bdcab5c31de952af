"""`millrace trace`: what every worker of a run did, as a file for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.resume import Run

Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where to write it. [default: RUN/trace.json]")
]


def trace(run: Run, output: Output = None) -> None:
    """Write what ranks, engines and rewards of a run did as a Chrome trace, a lane for each thing at once.

    The run may still be going on. Open the file in https://ui.perfetto.dev or chrome://tracing.
    """
    from millrace.observability.files import notice, shown
    from millrace.orchestration.events import read_events, read_spans
    from millrace.orchestration.run_folder import RunFolder, RunFolderError
    from millrace.orchestration.trace import chrome_trace

    folder = RunFolder.open(run)
    if not folder.events.is_file():
        raise RunFolderError(f"run {shown(run)} has no event log: it has not come to its first batch")
    events = read_events(folder.events, notice)
    if not any(event["kind"] == "dispatch" for event in events):
        raise RunFolderError(
            f"run {shown(run)}: its event log does not say what was asked of engines; an older millrace "
            "wrote it"
        )
    told = chrome_trace(events, [read_spans(path, notice) for path in folder.spans_of_ranks()])
    path = output or folder.path / "trace.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    slices = [one for one in told["traceEvents"] if one["ph"] == "X"]
    num_workers = len({one["pid"] for one in slices})
    typer.echo(
        f"{shown(path)}: {len(slices)} slices of {num_workers} workers; open it in "
        "https://ui.perfetto.dev or chrome://tracing"
    )
