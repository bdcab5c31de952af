"""Runs of the recipes with environments in every arrangement, their faults and kills; one table at the end.

    python scripts/agents.py                            # everything, an hour or two on two cores
    python scripts/agents.py --only kills --recipes guess
    python scripts/agents.py --quick                    # a few batches of each, some ten minutes

Each scenario but the last two trains both recipes, `calculator` and `guess`:

- `plain`: as the recipe is, with the environment in the trainer's process.
- `async`: two batches ahead, an engine and two environment workers in processes of their own.
- `ranks`: two ranks, with an environment worker.
- `ray`: two ranks and an engine as Ray actors, two batches ahead, with an environment worker.
- `kills`: as `async`, with kill -9 of the trainer, the engine and an environment worker in turn, after random
  batches. The run must go on by itself after the death of the last two, and by `millrace resume` after that
  of the first; no group may be lost or trained on twice, and no process may be left.
- `fault`: as `async`, with `environment.fault`. At most the fraction `--lost` of the sampled tokens may be
  those of attempts that failed.
- `replay`: the runs of `async`, `ranks`, `ray`, `kills` and `fault` that are there (that of `async` is made
  where there is none), with their environments live: equal bit for bit. That of `async` is replayed without
  its environments, too.
- `conversations`: the property tests with `--conversations` conversations over all templates. Turn by turn
  they have the tokens of the whole; sampler and trainer have the same log-probabilities, bit for bit, across
  weight updates; the text of at least 30 % of the turns would be encoded otherwise than it was sampled.
- `schedules`: `--schedules` fault schedules of the controller on a virtual clock; see chaos.py.

Accuracy is that of the last evaluation. It may be lower than in `plain` with the same seed by at most
`--calculator-tolerance` and `--guess-tolerance`. Asynchronous runs sample with other weights than synchronous
ones, and a number that a search of `guess` misses is 1/15 of its accuracy. The exit code is 0 only when all
passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from killed_run import (
    MILLRACE,
    Failed,
    KilledRun,
    check_finished,
    command_line,
    parent_of,
    processes_below,
)

from millrace.eventlog.log import read_events

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("calculator", "guess")
ASYNC = ["rollout.max_staleness=2", "engine.num_engines=1", "environment.workers=2"]
RANKS = ["mesh.dp_shard=2", "environment.workers=1"]
RAY = [*RANKS, "mesh.launcher=ray", "rollout.max_staleness=2", "engine.num_engines=1"]
TRAINER, ENGINE, WORKER = VICTIMS = ("trainer", "engine", "environment worker")
# Temporary folders that the keeper of a process removes are in its command line; see `millrace.keeper`.
FOLDERS = {b"millrace-engine-": ENGINE, b"millrace-environment-": WORKER}
QUICK = ["steps=6", "checkpoint.every=2", "evaluation.every=6", "sft.steps=20", "data.eval_size=30"]
QUICK += ["rollout.prompts_per_step=8"]
PROPERTIES = ("tests/data/test_conversation.py", "tests/twins/test_conversation_turns.py")
LIMIT_S = 7200.0
ROW = "{:14} {:12} {:>7}  {}"


@dataclass
class Trial:
    """One recipe in all scenarios.

    Attributes:
        recipe: its name.
        folder: of its runs, each named after its scenario.
        settings: of every run.
        tolerance: how much lower than that of `plain` an accuracy may be; None is not compared.
        given: the arguments of the command.
    """

    recipe: str
    folder: Path
    settings: list[str]
    tolerance: float | None
    given: argparse.Namespace

    def run(self, name: str) -> Path:
        """The run folder of a scenario."""
        return self.folder / name

    def command(self, name: str, settings: Sequence[str]) -> list[str]:
        """The command that trains a scenario's run."""
        own = [f"output={self.folder}", f"name={name}", "loggers=[]", f"seed={self.given.seed}"]
        return [*MILLRACE, "train", self.recipe, *own, *self.settings, *settings]

    def train(self, name: str, settings: Sequence[str]) -> str:
        """Train a scenario's run; its accuracy in words."""
        execute(self.command(name, settings))
        return self.accuracy(name)

    def accuracy(self, name: str) -> str:
        """The accuracy of a run in words, if it is near that of `plain`.

        Raises:
            Failed: the run has not finished or lost something, or its accuracy is too low.
        """
        if name != "plain" and self.tolerance is not None and not self.run("plain").exists():
            self.train("plain", [])
        summary = check_finished(self.run(name))
        words = f"accuracy {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}"
        if self.tolerance is not None:
            least = check_finished(self.run("plain"))["eval_after"] - self.tolerance
            if summary["eval_after"] < least:
                raise Failed(f"{words}, below {least:.3f}")
        return words


def execute(command: Sequence[str], **variables: str) -> str:
    """Run a command with further variables of the environment; its output.

    Raises:
        Failed: its exit code is not 0, or it took too long.
    """
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"`{' '.join(command[2:])}` runs for more than {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise Failed(f"`{' '.join(command[2:])}` has exit code {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


# ---- scenarios


def plain(trial: Trial) -> str:
    """As the recipe is."""
    return trial.train("plain", [])


def ahead(trial: Trial) -> str:
    """Asynchronous, with processes."""
    return trial.train("async", ASYNC)


def ranks(trial: Trial) -> str:
    """Two ranks."""
    return trial.train("ranks", RANKS)


def ray(trial: Trial) -> str:
    """Ray."""
    return trial.train("ray", RAY)


def find(command: int, first: int | None) -> dict[str, int]:
    """The trainer, its engine and one of its environment workers, of those that are there."""
    found = {TRAINER: command}
    for process in processes_below(command):
        keeper = command_line(parent_of(process) or 0)
        for folder, name in FOLDERS.items():
            if folder in keeper and folder not in command_line(process):
                found[name] = process
    return found


def kills(trial: Trial) -> str:
    """Killed and resumed."""
    rng = random.Random(trial.given.seed)
    victims = [VICTIMS[place % len(VICTIMS)] for place in range(trial.given.kills)]
    rng.shuffle(victims)
    run = KilledRun(trial.run("kills"), rng, trial.given.apart, victims, find, survivable={ENGINE, WORKER})
    # Quick batches are over before much dies.
    often = ["checkpoint.every=2", "steps=40"] if trial.given.quick else ["checkpoint.every=4"]
    run.finish(trial.command("kills", [*ASYNC, *often]))
    return f"{len(run.deaths)} deaths, {trial.accuracy('kills')}"


def fault(trial: Trial) -> str:
    """Failures of environments."""
    words = trial.train("fault", [*ASYNC, f"environment.fault={trial.given.fault}"])
    fraction, failed = lost_fraction(trial.run("fault"))
    words = f"{words}, {failed} attempts failed, {fraction:.1%} of tokens lost"
    if not failed or fraction > trial.given.lost:
        raise Failed(f"{words}; some attempts must fail, and at most {trial.given.lost:.1%} may be lost")
    return words


def lost_fraction(run: Path) -> tuple[float, int]:
    """The fraction of sampled tokens that attempts which failed had sampled, and the number of these."""
    failed = [event for event in read_events(run / "events.log") if event["kind"] == "episode_failed"]
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [one for one in map(json.loads, lines) if "tokens/sampled" in one]
    # A sample that is left out is in its batch, and counted there; one that is played again is in none.
    again = sum(event["tokens"] for event in failed if event["again"])
    lost = sum(event["tokens"] for event in failed)
    return lost / (sum(one["tokens/sampled"] for one in records) + again), len(failed)


def replays(trial: Trial) -> str:
    """Bit for bit, with environments live and without."""
    if not trial.run("async").exists():
        trial.train("async", ASYNC)
    replay = [*MILLRACE, "replay", "--quiet"]
    execute([*replay, str(trial.run("async"))])
    live = [name for name in ("async", "ranks", "ray", "kills", "fault") if trial.run(name).exists()]
    for name in live:
        execute([*replay, "--live", str(trial.run(name))])
    return f"async; with live environments {', '.join(live)}"


def conversations(given: argparse.Namespace) -> str:
    """The property tests."""
    number = 200 if given.quick else given.conversations
    only = ["-k", "in_many_conversations"]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *only, *PROPERTIES]
    output = execute(tests, TESTS_CONVERSATIONS=str(number))
    return f"{number} conversations in each of {len(PROPERTIES)} files, {output.splitlines()[-1].strip('= ')}"


def schedules(given: argparse.Namespace) -> str:
    """Fault schedules."""
    number = 200 if given.quick else given.schedules
    return execute([sys.executable, str(ROOT / "scripts" / "chaos.py"), "--schedules", str(number)]).strip()


OF_RECIPES: dict[str, Callable[[Trial], str]] = {
    "plain": plain,
    "async": ahead,
    "ranks": ranks,
    "ray": ray,
    "kills": kills,
    "fault": fault,
    "replay": replays,
}
OTHERS: dict[str, Callable[[argparse.Namespace], str]] = {
    "conversations": conversations,
    "schedules": schedules,
}


# ---- the table


@dataclass
class Outcomes:
    """What became of each scenario, in order: its row, and whether it passed."""

    rows: list[tuple[str, str, float, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, recipe: str, scenario: Callable[[], str]) -> None:
        """Run a scenario, and print its row."""
        began_s = time.monotonic()
        try:
            words = scenario()
        except Failed as failed:
            self.failures.append(f"{name} {recipe}: {failed}")
            # Of a command that failed, the last line has the error.
            *_, last = str(failed).strip().splitlines()
            words = f"FAILED: {re.sub(r' +', ' ', last)[:120]}"
        self.rows.append((name, recipe, time.monotonic() - began_s, words))
        print(self.line(len(self.rows) - 1), flush=True)

    def line(self, at: int) -> str:
        """One row of the table."""
        name, recipe, seconds, words = self.rows[at]
        return ROW.format(name, recipe, f"{seconds:.0f}", words)

    def table(self) -> str:
        """All rows, then what failed in full."""
        lines = [ROW.format("scenario", "recipe", "seconds", "result")]
        lines += [self.line(at) for at in range(len(self.rows))]
        return "\n".join([*lines, *(f"\n{failure}" for failure in self.failures)])


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [*OF_RECIPES, *OTHERS]
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="RECIPE")
    parser.add_argument("--quick", action="store_true", help="a few batches; accuracies are not compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--apart", type=int, default=4, help="at most so many batches between two deaths")
    parser.add_argument("--fault", type=float, default=0.05, help="fraction of episodes that fail on purpose")
    parser.add_argument("--lost", type=float, default=0.06, help="fraction of tokens that may be lost")
    parser.add_argument("--calculator-tolerance", type=float, default=0.03, help="of the accuracy")
    parser.add_argument("--guess-tolerance", type=float, default=0.15, help="of the accuracy")
    parser.add_argument("--conversations", type=int, default=10_000, help="of each file of property tests")
    parser.add_argument("--schedules", type=int, default=10_000, help="of faults")
    parser.add_argument("--output", type=Path, help="folder of the runs; a temporary one by default")
    given = parser.parse_args(words)
    if given.quick:
        given.kills, given.apart, given.lost = min(given.kills, 3), 1, 1.0
    return given


def main(words: Sequence[str]) -> int:
    """Run the scenarios and print the table; 0 where all passed."""
    given, outcomes = parsed(words), Outcomes()
    with tempfile.TemporaryDirectory() as aside:
        for recipe in given.recipes:
            tolerance = None if given.quick else getattr(given, f"{recipe}_tolerance")
            folder = (given.output or Path(aside)).resolve() / recipe
            trial = Trial(recipe, folder, QUICK if given.quick else [], tolerance, given)
            for name, scenario in OF_RECIPES.items():
                if name in given.only:
                    outcomes.add(name, recipe, partial(scenario, trial))
        for name, other in OTHERS.items():
            if name in given.only:
                outcomes.add(name, "", partial(other, given))
    print(f"\n{outcomes.table()}")
    return int(bool(outcomes.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
