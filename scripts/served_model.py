"""`millrace serve` for the scripts that ask a server."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from killed_run import MILLRACE

START_S, END_S = 300.0, 60.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A server; `url` has no path."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def served_model(model: str, token: str, *words: str) -> Iterator[ServedModel]:
    """Serve a model with these further options until the end of the block.

    Raises:
        RuntimeError: it did not answer in time; its errors are those of this process.
    """
    # Not on the command line, which any user of the machine can read.
    environment = {**os.environ, "MILLRACE_TOKEN": token}
    with subprocess.Popen(
        [*MILLRACE, "serve", model, "--port", "0", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            arrived, _, _ = select.select([process.stdout], [], [], START_S)
            line = process.stdout.readline() if arrived else f"it wrote nothing for {START_S:g} s"
            if " answers at " not in line:
                raise RuntimeError(f"the server did not start: {line.strip() or 'see its errors above'}")
            yield ServedModel(line.split(" answers at ")[1].split("/v1")[0], process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            finally:
                process.kill()
