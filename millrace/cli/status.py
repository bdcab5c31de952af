"""`millrace status`: the progress of a run and its pending waits."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from millrace.cli.resume import Run

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(run: Run, as_json: AsJson = False) -> None:
    """Say what a run is at, and while it runs, who waits for whom since when and until when."""
    from millrace.run.status import read_status

    found = read_status(run)
    typer.echo(json.dumps(found.tree(), indent=1) if as_json else "\n".join(found.lines()))
