"""`millrace engines`: the engines of a run that is going on, and how many it is to have."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from millrace.cli.resume import Run

Number = Annotated[int | None, typer.Argument(metavar="[N]", help="Have so many engines from now on.")]


def engines(run: Run, number: Number = None) -> None:
    """Show the engines of a running run and their target number, or request another number.

    Missing engines are started. Surplus ones return their partial output, and others continue from it.
    """
    from millrace.run.scaling import engines_of, request_engines

    found = engines_of(run) if number is None else request_engines(run, number, partial(typer.echo, err=True))
    typer.echo("\n".join(found.lines(run)))
