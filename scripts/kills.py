"""Processes of a Ray run killed after random batches: it must finish, with nothing lost or doubled.

    python scripts/kills.py             # 16 kills in the quickstart, some ten minutes on two cores
    python scripts/kills.py --kills 4 --apart 1 --accuracy 0 steps=20 checkpoint.every=2   # some minutes

The run is `millrace train RECIPE` with two trainer ranks and an engine as Ray actors, sampling two batches
ahead. Victims are the engine, the second trainer rank, the first one (which has the controller), and the
command itself (with Ray's head). After the engine's death the run must go on by itself; after any other it
must end with an error, and `millrace resume` must go on. At the end it must have finished with the accuracy,
by its event log every group that started was trained on once or dropped for a reason, within the staleness
bound, and no process may be left of any of its lives. Exit code 1: one of these is not so.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from killed_run import MILLRACE, Failed, KilledRun, check_finished, command_line, processes_below

from millrace.eventlog.log import read_events

SETTINGS = [
    "mesh.launcher=ray",
    "mesh.dp_shard=2",
    "rollout.max_staleness=2",
    "engine.num_engines=1",
    "loggers=[]",
]
ENGINE, SECOND, FIRST, COMMAND = VICTIMS = ("engine", "second rank", "first rank", "command")


def find(command: int, first: int | None) -> dict[str, int]:
    """The victims that are there."""
    found = {COMMAND: command}
    for process in processes_below(command):
        line = command_line(process)
        if line.startswith(b"ray::EngineActor."):
            found[ENGINE] = process
        elif line.startswith(b"ray::Rank.") and first is not None:
            found[FIRST if process == first else SECOND] = process
    return found


def check(run: Path, accuracy: float) -> str:
    """Check that a run has finished and lost nothing; return its accuracy in words.

    Raises:
        Failed: it has not finished, or not with this accuracy, or some groups have no end.
    """
    summary = check_finished(run)
    if summary["eval_after"] < accuracy:
        raise Failed(f"accuracy {summary['eval_after']:.3f} is below {accuracy}")
    return f"accuracy {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}"


def recoveries_s(run: Path) -> list[float]:
    """Seconds from the loss of each engine until another one has weights, of those that no resume forgot."""
    events = read_events(run / "events.log")
    lost_s = [event["time_s"] for event in events if event["kind"] == "engine_lost"]
    loads_s = [event["time_s"] for event in events if event["kind"] == "weights_loaded"]
    return [min(s for s in loads_s if s > since_s) - since_s for since_s in lost_s]


def main() -> int:
    """Run, kill, resume, and print what happened; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--apart", type=int, default=4, help="at most so many batches between two deaths")
    parser.add_argument("--accuracy", type=float, default=0.85, help="at the end, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder of the run; a temporary one by default")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    rounds, rest = divmod(given.kills, len(VICTIMS))
    victims = [*VICTIMS * rounds, *rng.sample(VICTIMS, rest)]
    rng.shuffle(victims)
    with tempfile.TemporaryDirectory() as aside:
        output = given.output or Path(aside)
        kills = KilledRun(output / "kills", rng, given.apart, victims, find, survivable={ENGINE})
        where = [f"output={output}", "name=kills"]
        command = [*MILLRACE, "train", given.recipe, *SETTINGS, *where, *given.settings]
        began_s = time.monotonic()
        try:
            kills.finish(command)
            accuracy = check(kills.run, given.accuracy)
            restarts = recoveries_s(kills.run)
        except Failed as failed:
            print(f"failed: {failed}")
            return 1
    for victim in VICTIMS:
        seconds = sorted(death.seconds for death in kills.deaths if death.victim == victim)
        if seconds:
            print(
                f"{victim}: {len(seconds)} deaths, {statistics.median(seconds):.1f} s until the next batch, "
                f"at most {seconds[-1]:.1f} s"
            )
    if restarts:
        usual_s, most_s = statistics.median(restarts), max(restarts)
        print(f"another engine has weights {usual_s:.1f} s after a loss, at most {most_s:.1f} s")
    print(f"{given.kills} deaths in {time.monotonic() - began_s:.0f} s, no group lost or doubled; {accuracy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
