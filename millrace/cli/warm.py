"""`millrace warm`: compile the kernels before a run does."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer


def warm(
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes at once; as many as there are processors by default.")
    ] = None,
) -> None:
    """Compile the CPU kernels now, which the first run would do otherwise.

    They stay on disk until millrace is updated, so a second call has nothing to do.
    """
    # Late, since it imports torch.
    from millrace.kernels.warm import warm as warm_kernels

    started_s, num_compiled = time.perf_counter(), 0
    for group in warm_kernels(workers or len(os.sched_getaffinity(0))):
        num_compiled += group.num_compiled
        done = f"{group.num_compiled} functions compiled" if group.num_compiled else "compiled before"
        print(f"{group.group:<18} {done:<24} {group.seconds:6.1f} s", flush=True)
    print(f"{num_compiled} functions compiled in {time.perf_counter() - started_s:.1f} s")
