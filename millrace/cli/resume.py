"""`millrace resume`: take a run up again."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.cli.train import Quiet, as_a_rank, show_result, start_ranks

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, such as runs/quickstart-1.")]


def resume(run: Run, quiet: Quiet = False) -> None:
    """Continue an interrupted or failed run at its newest whole checkpoint.

    It ends bit for bit as it would have without the interruption. Exit codes are those of train.
    """
    from millrace.run.launch import run_config

    if start_ranks(run_config(run).mesh):
        from millrace.launchers.ray_ranks import resume as continue_run
    else:
        from millrace.run.loop import resume as continue_run

    show_result(as_a_rank(lambda: continue_run(run, quiet=quiet)))
