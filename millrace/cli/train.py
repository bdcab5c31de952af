"""`millrace train`: a recipe, from start to end."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.observability.plain import plain_text

if TYPE_CHECKING:
    from millrace.config.mesh_section import MeshConfig
    from millrace.run.progress import RunReport

INTERRUPTED = 130
# Set for ranks whose launcher reports which rank failed first.
QUIETLY = "MILLRACE_RANKS_WATCHED"

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a file of your own (my.yaml).")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change, such as steps=50.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result alone.")]


def train(recipe: Recipe, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Train a policy in a new run folder.

    Ctrl-C or SIGTERM finishes the step, saves and leaves; a second one leaves at once.

    Exit code: 0 finished, 130 interrupted, 1 failed, 2 a mistake in the recipe.
    """
    from millrace.config.recipe import load_recipe, parse_overrides

    # A mistake in the recipe shows before the seconds it takes to load torch.
    config = load_recipe(recipe, parse_overrides(overrides or []))
    name, on_ray = Path(recipe).stem, start_ranks(config.mesh)
    with as_a_rank():
        if on_ray:
            from millrace.launchers import ray_ranks

            report = ray_ranks.train(config, recipe=name, quiet=quiet)
        else:
            from millrace.run import loop

            report = loop.train(config, recipe=name, quiet=quiet)
    show_result(report)


def start_ranks(mesh: MeshConfig) -> bool:
    """Start this command once per rank and exit with the run's exit code; return whether Ray starts them.

    Does nothing for a single rank, or if this process is already a rank.

    Raises:
        typer.Exit: with the exit code of the run.
        PlanError: the sizes of the mesh are inconsistent.
        RankFailed: a rank failed; the message contains the end of its output.
    """
    # Processes that torchrun starts are ranks already.
    if "RANK" in os.environ:
        if QUIETLY in os.environ:
            from millrace.keeper import end_with_parent

            # Without its launcher no rank would be stopped when another one fails.
            end_with_parent()
        return False
    from millrace.planner.layout import Layout

    # Check the mesh once here, so that not every rank reports the error.
    Layout.of(mesh.model_dump())
    if mesh.launcher == "ray":
        return True
    if mesh.num_ranks == 1:
        return False
    from millrace.launchers.local_ranks import run_ranks, this_command

    raise typer.Exit(run_ranks(this_command(), mesh.num_ranks, environment={QUIETLY: "1"}))


@contextmanager
def as_a_rank() -> Iterator[None]:
    """Exit with a short message where the block loses another rank, since the failed rank reports why."""
    try:
        yield
    except Exception as error:
        from millrace.distributed.ranks import lost_others
        from millrace.launchers.supervise import LOST

        if not lost_others(error):
            raise
        if QUIETLY not in os.environ:
            typer.echo(f"error: another rank of this run has gone ({error})", err=True)
        raise typer.Exit(LOST) from None


def speaks() -> bool:
    """Return whether this process prints the result of the run (rank 0)."""
    return os.environ.get("RANK", "0") == "0"


def show_result(report: RunReport) -> None:
    """Print the result of a run and the next command, on rank 0; exit with code 130 if it was interrupted."""
    if speaks():
        for line in result_lines(report):
            typer.echo(plain_text(line, 2000))
    if report.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def result_lines(report: RunReport) -> list[str]:
    """Format the result of a run in a few lines."""
    from millrace.observability.console import clock_text
    from millrace.observability.measure import held_out_words, measure_words

    run = shlex.quote(report.run)
    spent = clock_text(report.wall_s)
    warmed = report.sft_steps and not report.steps
    done = f"step {report.sft_steps} of SFT" if warmed else f"batch {report.steps}"
    if report.status == "interrupted":
        why = "out of time (timeouts.walltime_s)" if report.out_of_time else "interrupted"
        return [
            f"{why} after {done} at {spent}; everything is saved",
            f"continue: millrace resume {run}",
        ]
    before, after, best = (
        "unknown" if value is None else f"{value:.3f}"
        for value in (report.eval_before, report.eval_after, report.eval_best)
    )
    measure = measure_words(report.measure)
    where = held_out_words(report.measure, f"{report.eval_size} held-out prompts")
    lines = [
        f"{measure} {before} -> {after}{where}, after {done} at {spent}",
        f"report: {report.run}/report.html  best checkpoint: {report.best_checkpoint} ({measure} {best})",
        f'next: millrace evaluate {run}, or: millrace generate {run} "PROMPT"',
    ]
    if report.warnings:
        lines.insert(1, f"warnings: {len(report.warnings)}, the last: {report.warnings[-1]}")
    return lines
