"""`millrace simulate`: how to share accelerators between sampling and training, before any is bought."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.cli.plan import Mfu, read_shape, refusal, workload
from millrace.cli.train import Overrides
from millrace.errors import PlanError

if TYPE_CHECKING:
    from millrace.config.settings import RunConfig
    from millrace.simulation.calibrate import MeasuredRun
    from millrace.simulation.from_plan import Machines
    from millrace.simulation.simulate import Simulated

Recipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="A recipe's name, or a file of your own. [default: of --from]"),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        help="How many accelerators, and which (else H100), such as 128xH200; with --from how many alone."
    ),
]
Split = Annotated[
    str, typer.Option(metavar="search|K", help="How many of them sample; search finds the best.")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="RUN", help="Take durations from this run, and compare it with its own."),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="MEDIAN,SPREAD",
        help="Tokens of answers: lognormal, SPREAD the deviation of the logarithm. "
        "[default: a quarter of rollout.max_tokens, 0.8]",
    ),
]
Picture = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write what engines and trainer do as SVG.")
]

# Batches that count, rounded up to whole waves: all that the bound allows starts together.
NUM_COUNTED = 6
# At most so many splits are looked at.
MOST_SPLITS = 32
FAR_AHEAD = 4
NAMES = {
    "step_s": "step, s",
    "wait_s": "  waiting, s",
    "train_s": "  training, s",
    "weight_sync_s": "  weight sync, s",
    "tokens_per_s": "tokens/s",
    "staleness": "staleness",
}


@dataclass(frozen=True, slots=True)
class TableRow:
    """A line of the table."""

    mode: str
    num_sampling: int
    num_training: int
    run: Simulated

    @property
    def idle(self) -> float:
        """Fraction of all accelerators' time without sampling or training."""
        run, num_gpus = self.run, self.num_sampling + self.num_training
        if self.mode == "colocated":
            return 1 - run.engines_busy - run.trainer_busy
        busy = self.num_sampling * run.engines_busy + self.num_training * run.trainer_busy
        return 1 - busy / num_gpus


def simulate(
    recipe: Recipe = None,
    overrides: Overrides = None,
    *,
    gpus: Gpus = None,
    split: Split = "search",
    run: From = None,
    lengths: Lengths = None,
    mfu: Mfu = 0.4,
    picture: Picture = None,
) -> None:
    """Compare ways to share accelerators: in turns, synchronous, one step off, further ahead.

    The run's own controller goes through some batches on a virtual clock. Durations are those of `millrace
    plan`, or measured ones of a run; that run is compared with its own simulation first. No weight is read.

    Exit code: 0, or 2 for a mistake in the words.
    """
    from millrace.config.recipe import load_recipe, parse_overrides
    from millrace.config.settings import num_answers
    from millrace.simulation.from_plan import check_simulated, measured_machines

    found = None
    if run is not None:
        from millrace.simulation.calibrate import read_measured

        found = read_measured(run)
        if gpus is None and (recipe is not None or picture is not None):
            raise PlanError(
                "--gpus is missing; with --from alone, without RECIPE and --picture, a run is compared with "
                "its own simulation"
            )
        for line in comparison(run, found):
            typer.echo(line)
    if gpus is None:
        if found is None:
            raise PlanError("--gpus is missing; write how many, x, and which, such as 128xH200")
        return
    if recipe is None and run is None:
        raise PlanError("RECIPE is missing; give a recipe, or a run with --from")
    config = load_recipe(recipe or f"{run}/recipe.yaml", parse_overrides(overrides or []))
    check_simulated(config.rollout)
    if found is not None:
        machines = measured_machines(config.rollout, found, gpus, lengths, num_samples=num_answers(config))
    else:
        machines = _planned(config, gpus, lengths, mfu)
    rows = table(config, machines, split)
    for line in table_lines(config, machines, rows):
        typer.echo(line)
    if picture is not None:
        write_picture(rows, picture)


def _planned(config: RunConfig, gpus: str, lengths: str | None, mfu: float) -> Machines:
    from millrace.config.rollout_section import synchronous
    from millrace.config.settings import num_answers
    from millrace.simulation.from_plan import planned_machines

    shape, work = read_shape(config), workload(config)
    if work.engine_ranks > 1:
        raise PlanError(
            f"engine.tensor_parallel_size {work.engine_ranks} cannot be simulated; change it for the "
            "simulation"
        )
    # The layout of ranks does not depend on how far sampling runs ahead.
    refuse = partial(refusal, config.model_copy(update={"rollout": synchronous(config.rollout)}), shape)
    return planned_machines(
        config.rollout,
        gpus,
        lengths,
        num_samples=num_answers(config),
        shape=shape,
        work=work,
        refuse=refuse,
        mfu=mfu,
    )


def comparison(run: str, found: MeasuredRun) -> Iterator[str]:
    """A run beside its own simulation; PlanError if what it did cannot be simulated."""
    from millrace.simulation.from_plan import check_simulated, foreseen

    check_simulated(found.rollout)
    runs = foreseen(found, found)
    yield (
        f"{run}: {found.num_batches} batches at staleness {found.rollout.max_staleness}, "
        f"{found.num_engines} engines, {found.num_ranks} ranks"
    )
    yield f"  {'':16}{'simulated':>12}{'measured':>12}{'error':>9}"
    for key, name in NAMES.items():
        number = fmean(run.staleness[0] if key == "staleness" else getattr(run, key) for run in runs)
        error = f"{number / found.step[key] - 1:+9.1%}" if key in ("step_s", "tokens_per_s") else ""
        yield f"  {name:16}{number:12.4g}{found.step[key]:12.4g}{error}"
    yield ""


def table(config: RunConfig, machines: Machines, split: str) -> list[TableRow]:
    """Every mode with every split; PlanError if one leaves nothing to sample or train on, or nothing fits."""
    from millrace.simulation.simulate import best_split, simulate

    num_gpus, rows = machines.num_gpus, []

    def tried(mode: str, staleness: int, num_sampling: int) -> float:
        # Where all of them sample, all of them train, too.
        num_training = num_gpus - num_sampling or num_gpus
        work = machines.work(staleness, num_sampling, num_training)
        if work is None:
            return math.inf
        wave = staleness + 1
        run = simulate(work, num_batches=wave + math.ceil(NUM_COUNTED / wave) * wave, num_first=wave)
        rows.append(TableRow(mode, num_sampling, num_training, run))
        return run.step_s

    splits = possible_splits(num_gpus, split)
    fitting = [one for one in splits if machines.work(0, one, num_gpus - one) is not None]
    if split != "search" and not fitting:
        raise PlanError(
            f"--split {split} leaves {num_gpus - int(split)} to train on, where the recipe cannot be "
            "trained; ask millrace plan what to change"
        )
    tried("colocated", 0, num_gpus)
    far = config.rollout.max_staleness if config.rollout.max_staleness > 1 else FAR_AHEAD
    for mode, staleness in {"synchronous": 0, "one step off": 1, f"{far} steps ahead": far}.items():
        if fitting:
            best_split(fitting, partial(tried, mode, staleness))
    if not rows:
        raise PlanError(
            f"the recipe cannot be trained on {num_gpus} accelerators; ask millrace plan what to change"
        )
    return rows


def possible_splits(num_gpus: int, split: str) -> list[int]:
    """How many may sample: search, or a number; PlanError unless some are left to train on."""
    if split == "search":
        every = -(-num_gpus // MOST_SPLITS)
        return list(range(every, num_gpus, every))
    if not split.isdecimal() or not 0 < int(split) < num_gpus:
        raise PlanError(
            f"--split is {split}; of {num_gpus} accelerators 1 to {num_gpus - 1} can sample, or write search"
        )
    return [int(split)]


def best_rows(rows: list[TableRow]) -> dict[str, TableRow]:
    """The quickest split of each mode."""
    best: dict[str, TableRow] = {}
    for row in rows:
        if row.mode not in best or row.run.step_s < best[row.mode].run.step_s:
            best[row.mode] = row
    return best


def table_lines(config: RunConfig, machines: Machines, rows: list[TableRow]) -> Iterator[str]:
    """The table; a star marks the best split of each mode."""
    from millrace.config.settings import num_answers

    rollout, best = config.rollout, best_rows(rows)
    first = min((row.run.step_s for row in rows if row.mode == "colocated"), default=None)
    yield f"durations: {machines.source}"
    yield f"a batch: {rollout.prompts_per_step} prompts x {num_answers(config)} answers"
    yield ""
    yield (
        f"  {'mode':16}{'sampling':>9}{'training':>9}{'step, s':>10}{'tokens/s':>11}{'speed':>7}"
        f"{'engines idle':>14}{'trainer idle':>14}{'all idle':>10}{'staleness':>11}"
    )
    for row in sorted(rows, key=lambda row: (list(best).index(row.mode), row.num_sampling)):
        run, star = row.run, "*" if best[row.mode] is row else " "
        mean, most = run.staleness
        speed = f"{first / run.step_s:6.2f}x" if first else f"{'':7}"
        yield (
            f"{star} {row.mode:16}{row.num_sampling:9}{row.num_training:9}{run.step_s:10.4g}"
            f"{run.tokens_per_s:11,.0f}{speed}{_percent(1 - run.engines_busy):>14}"
            f"{_percent(1 - run.trainer_busy):>14}{_percent(row.idle):>10}{mean:7.1f}, {most}"
        )


def _percent(idle: float) -> str:
    # What is idle for no time at all may be below 0 by rounding.
    return f"{abs(round(idle, 2)):.0%}"


def write_picture(rows: list[TableRow], picture: str) -> None:
    """Write the best split of each mode as SVG."""
    from millrace.simulation.timeline import timeline_svg

    runs = {
        f"{mode}: {row.num_sampling} sample, {row.num_training} train, {row.run.step_s:.3g} s a step": row.run
        for mode, row in best_rows(rows).items()
    }
    Path(picture).write_text(timeline_svg(runs, title="Timeline of engines and trainer"), encoding="utf-8")
    typer.echo(f"\npicture: {picture}")
