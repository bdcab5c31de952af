"""Run every stage that a change must pass, each to its end, and print one report.

    python scripts/gate.py                 # all stages
    python scripts/gate.py lint type test  # some of them
    python scripts/gate.py --list

A stage is a make target, so that it can be repeated alone with the command that the report prints. Stages
whose whole takes long run an eighth here. A hash of the tree chooses which eighth: one tree is always tested
in the same way, and the next one in another. Exit code 1: a stage failed or took longer than its limit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
FLAKY = ROOT / "runs" / "flaky.json"
TAIL_LINES = 60
DRAIN_S = 5.0
# So many stages of a group run at once; the next begins when one ends.
MOST_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """A make target with its arguments.

    Attributes:
        name: the target.
        limit_s: seconds after which the stage hangs; several times what it takes on two busy cores.
        arguments: for the target's ARGS.
        yields: the stages beside it have the processors first.
    """

    name: str
    limit_s: float
    arguments: str = ""
    yields: bool = False

    @property
    def command(self) -> list[str]:
        """What runs it."""
        nice = ["nice"] if self.yields else []
        return [*nice, "make", "--no-print-directory", self.name, f"ARGS={self.arguments}"]

    def __str__(self) -> str:
        return f"make {self.name}" + (f' ARGS="{self.arguments}"' if self.arguments else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended; `problem` is empty where it passed.

    Attributes:
        stage: what ran.
        seconds: from its start to its end.
        cpu_s: of all its processes, but for those that nothing waited for.
        problem: what went wrong.
        tail: its last lines of output.
    """

    stage: Stage
    seconds: float
    cpu_s: float
    problem: str
    tail: str


def groups(digest: str) -> list[list[Stage]]:
    """All stages, in order, for a tree with this hexadecimal hash; those of one group run at once."""
    number = int(digest[:8], 16)
    kills = f"--kills 2 --apart 1 --accuracy 0 --seed {number} steps=12 checkpoint.every=1 sft.steps=20"
    # Each start of a rank reads the data and starts its reward workers.
    kills += " data.task_size=4000 data.eval_size=64 rewards.0.workers=1"
    mutants = f"--changed --most 40 --drawn 10 --seed {number} --budget-s 80"
    return [
        [Stage("setup", 1800)],
        [Stage("lint", 120)],
        [Stage("type", 900), Stage("warm", 900)],
        [Stage("test", 2700)],
        # Whatever waits leaves the processors to the others. What takes longest begins first.
        [
            Stage("kills", 2700, kills),
            # Both `world` and the eighth of `slow`: each worker imports all test files once.
            Stage("long", 3600, f"--eighth {digest[:16]}"),
            Stage("mutants", 1200, mutants, yields=True),
            Stage("bench", 1800, f"--quick --eighth {digest[:16]}", yields=True),
            Stage("soak", 600, f"--seconds 75 --seed {number}"),
            # It computes alone at the end.
            Stage("chaos", 1800, f"--schedules 3000 --first {number} --workers 2", yields=True),
        ],
    ]


def tree_hash(root: Path) -> str:
    """A hash of the names and contents of all files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    digest = hashlib.sha256()
    for name in sorted(set(listed.stdout.split(b"\0")) - {b""}):
        path = root / os.fsdecode(name)
        content = path.read_bytes() if path.is_file() else b""
        digest.update(name + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def run(stage: Stage, prefix: str = "") -> Outcome:
    """Run a stage and show its output; end it with all its processes where it exceeds its limit."""
    print(f"\n{prefix}=== {stage}", flush=True)
    started_s, lines = time.monotonic(), deque[str](maxlen=TAIL_LINES)
    process = subprocess.Popen(
        stage.command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def show(output: IO[str]) -> None:
        with output:
            for line in output:
                print(f"{prefix}{line}", end="", flush=True)
                lines.append(line)

    assert process.stdout is not None
    # Not this thread: a process that left the group may keep the output open after the stage has ended.
    reader = threading.Thread(target=show, args=(process.stdout,), daemon=True)
    reader.start()
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(stage.limit_s, end)
    timer.start()
    # `process.wait` does not say what the stage used. Its group exists until it is waited for below.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    timer.cancel()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    problem = f"exit code {code}" if code else ""
    if late.is_set():
        problem = f"still running after {stage.limit_s:g} s"
    reader.join(DRAIN_S)
    seconds, cpu_s = time.monotonic() - started_s, used.ru_utime + used.ru_stime
    return Outcome(stage, seconds, cpu_s, problem, "".join(lines))


def run_groups(groups: Sequence[Sequence[Stage]]) -> list[Outcome]:
    """Run all stages; without a setup none of the others."""
    outcomes: list[Outcome] = []
    for group in groups:
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            prefixes = [f"{stage.name}| " if len(group) > 1 else "" for stage in group]
            outcomes += pool.map(run, group, prefixes)
        if any(outcome.stage.name == "setup" and outcome.problem for outcome in outcomes):
            break
    return outcomes


def report(outcomes: Sequence[Outcome], groups: Sequence[Sequence[Stage]], total_s: float) -> str:
    """The last lines of every failed stage, then one line per stage."""
    parts = [f"--- end of {o.stage}: {o.problem}\n{o.tail}" for o in outcomes if o.problem]
    parts.append(f"{'stage':<10} {'seconds':>8} {'CPU s':>7}  result")
    parts += [
        f"{o.stage.name:<10} {o.seconds:8.0f} {o.cpu_s:7.0f}  {o.problem or 'passed'}" for o in outcomes
    ]
    every = [stage for group in groups for stage in group]
    parts += [f"{stage.name:<10} {'':>16}  not run, since setup failed" for stage in every[len(outcomes) :]]
    failed = [str(o.stage) for o in outcomes if o.problem]
    verdict = f"failed; repeat with: {'; '.join(failed)}" if failed else "passed"
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    parts.append(f"{'gate':<10} {total_s:8.0f} {cpu_s:7.0f}  {verdict}")
    if FLAKY.is_file():
        parts.append(f"tests that failed once and passed alone, to be mended next: {FLAKY.read_text()}")
    return "\n".join(parts)


def main() -> int:
    """Run the stages, print the report; 0 where all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="STAGE", help="all without it")
    parser.add_argument("--list", action="store_true", help="print the command of every stage and run none")
    given = parser.parse_args()
    every = groups(tree_hash(ROOT))
    names = [stage.name for group in every for stage in group]
    if unknown := set(given.names) - set(names):
        raise SystemExit(f"no stage {', '.join(sorted(unknown))}; there are {' '.join(names)}")
    chosen = [[stage for stage in group if not given.names or stage.name in given.names] for group in every]
    if given.list:
        print("\n".join(str(stage) for group in chosen for stage in group))
        return 0
    started_s = time.monotonic()
    outcomes = run_groups(chosen)
    print(f"\n{report(outcomes, chosen, time.monotonic() - started_s)}")
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
