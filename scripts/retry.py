"""Run tests; repeat each that failed once, alone.

    python scripts/retry.py -n 2 -m "world and not slow"    # arguments are pytest's

Tests of processes and ports share a machine with everything else that runs on it. One that fails twice, the
second time with nothing of ours beside it, rejects the change: exit code 1. One that fails once is a bug of
the test or of what it tests: it is printed, and counted in runs/flaky.json, to be mended next.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAKY = ROOT / "runs" / "flaky.json"
TESTS_FAILED, NO_TESTS = 1, 5


def run(arguments: Sequence[str], cache: Path) -> tuple[int, set[str]]:
    """Pytest's exit code, and the names of the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    failed = cache / "v" / "cache" / "lastfailed"
    return code, set(json.loads(failed.read_text(encoding="utf-8"))) if failed.is_file() else set()


def alone(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that ask for several workers."""
    kept, skip = list[str](), False
    for argument in arguments:
        if skip or argument in ("-n", "--dist", "--maxprocesses"):
            skip = not skip
        elif not argument.startswith(("-n", "--dist=", "--maxprocesses=", "--no-loadscope")):
            kept.append(argument)
    return kept


def count(names: set[str], path: Path) -> None:
    """Add one to the number of times that each of these tests failed once."""
    counts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run, repeat what failed, say what failed only once."""
    with tempfile.TemporaryDirectory() as folder:
        code, first = run(arguments, Path(folder))
        # A file that cannot be imported fails again.
        if code != TESTS_FAILED or not first or any("::" not in name for name in first):
            return 0 if code == NO_TESTS else code
        print(f"\nrepeating alone {len(first)} that failed", flush=True)
        code, second = run(
            [*alone(arguments), "--last-failed", "--last-failed-no-failures=none"], Path(folder)
        )
    once = first - second
    if once:
        count(once, FLAKY)
        print(f"\nfailed once and passed alone, counted in {FLAKY.relative_to(ROOT)}; to be mended next:")
        print("\n".join(f"  {name}" for name in sorted(once)), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
