"""Run every script in benchmarks/ and examples/, and print a table of how each ended.

    python scripts/bench.py                    # everything at its full length, hours
    python scripts/bench.py --quick            # each in seconds; no result is written
    python scripts/bench.py --quick gae own_task/make_data

Words that begin with a dash are handed to every script. One that ends with status 2 says itself what this
machine lacks and counts as skipped. Exit code 1: a script failed, or a quick one changed a file of results.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 2  # the status of a script that needs what this machine does not have
QUICK_LIMIT_S = 300.0
PARTS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a script ended; `problem` is empty where it passed or was skipped."""

    name: str
    seconds: float
    problem: str
    skipped: bool = False


def scripts(root: Path) -> dict[str, Path]:
    """All that can be run, by name: those in benchmarks/, and those with a main in folders of examples/."""
    found = {path.stem: path for path in sorted((root / "benchmarks").glob("*.py"))}
    for path in sorted((root / "examples").glob("*/*.py")):
        if "__main__" in path.read_text(encoding="utf-8"):
            found[f"{path.parent.name}/{path.stem}"] = path
    return found


def drawn(names: Sequence[str], salt: str) -> list[str]:
    """The eighth of the scripts, rounded up, that a salt chooses."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{salt} {name}".encode()).digest())
    chosen = set(ranked[: -(-len(ranked) // PARTS)])
    return [name for name in names if name in chosen]


def written(root: Path) -> dict[Path, bytes]:
    """The contents of what scripts write to be committed."""
    folders = [root / "benchmarks" / "results", root / "docs", root / "examples"]
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*.*") if path.is_file()}


def run(name: str, path: Path, words: Sequence[str], root: Path) -> Outcome:
    """Run a script and show its output; a quick one must leave the committed files as they are."""
    quick = "--quick" in words
    print(f"\n== {name}", flush=True)
    before, started_s = written(root) if quick else {}, time.monotonic()
    try:
        limit_s = QUICK_LIMIT_S if quick else None
        code = subprocess.run([sys.executable, str(path), *words], cwd=root, timeout=limit_s).returncode
        problem = f"exit code {code}" if code not in (0, SKIPPED) else ""
    except subprocess.TimeoutExpired:
        code, problem = 1, f"still running after {QUICK_LIMIT_S:g} s"
    seconds = time.monotonic() - started_s
    if quick and not problem:
        after = written(root)
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        if changed:
            problem = f"wrote {', '.join(sorted(str(one.relative_to(root)) for one in changed))}"
    return Outcome(name, seconds, problem, code == SKIPPED and not problem)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per script."""
    width = max(len("script"), *(len(one.name) for one in outcomes))
    lines = [f"{'script':<{width}} {'seconds':>8}  result"]
    for one in outcomes:
        result = "skipped, as it says above" if one.skipped else one.problem or "passed"
        lines.append(f"{one.name:<{width}} {one.seconds:8.0f}  {result}")
    return "\n".join(lines)


def main(words: Sequence[str], root: Path = ROOT) -> int:
    """Run the scripts that are named, or all; 0 where none failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help="all without it")
    parser.add_argument("--eighth", metavar="SALT", help="only the eighth that this word chooses")
    given, handed = parser.parse_known_args(words)
    every = scripts(root)
    if unknown := set(given.names) - set(every):
        parser.error(f"no script {', '.join(sorted(unknown))}; there are {' '.join(every)}")
    names = given.names or list(every)
    if given.eighth is not None:
        names = drawn(names, given.eighth)
    outcomes = [run(name, every[name], handed, root) for name in names]
    print(f"\n{table(outcomes)}")
    return int(any(one.problem for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
