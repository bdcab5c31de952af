"""`millrace replay`: a run again, bit for bit."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from millrace.cli.resume import Run
from millrace.cli.train import Quiet, as_a_rank, show_result, speaks, start_ranks
from millrace.observability.files import shown

FromStep = Annotated[
    int | None,
    typer.Option("--from-step", min=1, help="Repeat so many batches, then go on as a run of its own."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="With --from-step: a setting that changes there."),
]
Name = Annotated[str | None, typer.Option(help="Folder of the new run; by default RUN-replay-1, ...")]


Live = Annotated[
    bool,
    typer.Option(
        "--live", help="Run the environments, too, and compare their replies with the recorded ones."
    ),
]


def replay(
    run: Run,
    from_step: FromStep = None,
    set_: Set = None,
    name: Name = None,
    live: Live = False,
    quiet: Quiet = False,
) -> None:
    """Repeat a run from its event log in a new folder, and prove that it is the same bit for bit.

    Its ranks are processes of this machine, also where Ray started those of the run.

    With --live, its environments run beside it; the replay goes on with the recorded replies.

    Exit code: 0 the same, 1 it differs or has no log, 2 it cannot be replayed; then those of train.
    """
    from millrace.config.recipe import parse_overrides

    changes = parse_overrides(set_ or [])
    from millrace.replay.replay import check
    from millrace.replay.replay import replay as repeat

    config, _ = check(run, from_step=from_step, changes=changes, live=live)
    start_ranks(config.mesh)
    with as_a_rank():
        found = repeat(run, from_step=from_step, changes=changes, name=name, live=live, quiet=quiet)
    if speaks():
        weights = f" and the weights of {', '.join(found.weights)}" if found.weights else ""
        typer.echo(
            f"replayed {found.num_batches} batches in {shown(shlex.quote(str(found.run)))}: every decision, "
            f"{found.num_records} records, all samples{weights} are the same bit for bit"
        )
        if live:
            typer.echo(
                f"the environments replied as recorded, live: {found.num_replies} replies of "
                f"{found.num_episodes} episodes"
            )
    if found.report is not None:
        show_result(found.report)
