"""Random faults of prefill and decode workers, in threads: every bit must be that of one engine.

    python scripts/serving_faults.py --schedules 10000      # an hour of one core
    python scripts/serving_faults.py --first 4711 --schedules 1
    python scripts/serving_faults.py --schedules 400 --network   # blocks travel as between machines

Workers die before reports, blocks and their versions are spoiled, weights are updated, samples aborted; see
`tests/engines/serving_schedules.py`. Exit code 1: a schedule failed, and its number is printed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the schedules, print what happened in them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--network", action="store_true", help="blocks travel by gloo, not by shared memory")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.engines.serving_schedules import run_schedule

    torch.set_num_threads(1)
    logging.disable()  # each fault is a warning
    totals, failed = Counter[str](), 0
    for number in range(given.first, given.first + given.schedules):
        try:
            counts, faults = run_schedule(number, network=given.network)
        except Exception as error:
            failed += 1
            print(f"schedule {number}: {type(error).__name__}: {error}", flush=True)
            continue
        totals += Counter(
            complete=counts.complete,
            partial=counts.partial,
            failed=counts.failed,
            deaths=faults.num_deaths,
            spoiled=faults.num_spoiled,
        )
    found = ", ".join(f"{name} {count}" for name, count in totals.items())
    print(f"{given.schedules} schedules, {failed} failed; transfers and faults: {found}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
