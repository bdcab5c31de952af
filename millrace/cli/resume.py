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
    # Without torch: what launches the ranks computes nothing.
    from millrace.run.folder import RunFolder

    on_ray = start_ranks(RunFolder.open(run).config().mesh)
    with as_a_rank():
        if on_ray:
            from millrace.launchers import ray_ranks

            report = ray_ranks.resume(run, quiet=quiet)
        else:
            from millrace.run import loop

            report = loop.resume(run, quiet=quiet)
    show_result(report)
