"""`millrace engines`: the engines of a run that is going on, and how many it is to have."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from millrace.cli.resume import Run

Number = Annotated[int | None, typer.Argument(metavar="[N]", help="Have so many engines from now on.")]


def engines(run: Run, number: Number = None) -> None:
    """Say which engines a run that is going on has and how many are wanted, or ask for another number.

    What is missing is started. What is too much hands over what it has drawn, for others to go on with.
    """
    from millrace.run.scaling import engines_of, request_engines

    found = engines_of(run) if number is None else request_engines(run, number, partial(typer.echo, err=True))
    typer.echo("\n".join(found.lines(run)))
