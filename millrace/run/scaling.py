"""Scale requests: the number of engines of a running run, through a file in its folder and its status.

No torch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from millrace.config.recipe import ConfigError
from millrace.config.settings import num_processes
from millrace.observability.files import Shape, read_json
from millrace.rollout.backend import ScaleRequest
from millrace.rollout.engine_pool import Engines
from millrace.run.folder import RunFolder, RunFolderError
from millrace.run.status import Status, read_status

# Interval of the run's check for a request, and of the client's check for the answer.
CHECK_S = 1.0
POLL_S = 0.1
# Longest time until a run reads a request: no batch, weight update or save of a sound run takes longer.
READ_S = 60.0


class _Request(Shape):
    """Content of `scale.json`."""

    id: str
    engines: int


class ScaleRequestFile:
    """The run's side: reads scale requests.

    Attributes:
        last_request: id of the last request read; empty before the first.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Remove the request of an earlier process of the run.

        Args:
            path: of the request file.
            clock: seconds.
        """
        self._path, self._clock = path, clock
        self._checked_s = clock()
        self.last_request = ""
        self.close()

    def poll(self) -> list[ScaleRequest]:
        """Return a new scale request, if there is one; the file is read at most once a second."""
        if self._clock() < self._checked_s + CHECK_S:
            return []
        self._checked_s = self._clock()
        # A damaged request must not end the run, and no client waits for its answer.
        with suppress(ValueError):
            request = read_json(self._path, _Request)
            if request.id != self.last_request:
                found = [ScaleRequest(_checked(request.engines), id=request.id)]
                self.last_request = request.id
                return found
        return []

    def close(self) -> None:
        """Delete the request file."""
        self._path.unlink(missing_ok=True)


def engines_of(run: str | Path) -> Engines:
    """Return the engines of a running run.

    Raises:
        RunFolderError: it is not running, or has no engines in their own processes.
    """
    status, folder = read_status(run), RunFolder.open(run)
    if status.state not in ("running", "starting"):
        hint = "start another one" if status.state == "finished" else f"go on with: millrace resume {run}"
        raise RunFolderError(f"run {run} is {status.state}, so it has no engines; {hint}")
    config = folder.config()
    if not num_processes(config):
        turns = " without engine.colocated" if config.engine.colocated else ""
        raise RunFolderError(
            f"run {run} generates in the trainer's process, whose number of engines is fixed; start "
            f"one with engine.num_engines=1{turns}"
        )
    if status.engines is None:
        raise RunFolderError(
            f"run {run} does not sample for reinforcement yet; ask again when millrace status {run} says so"
        )
    return status.engines


def request_engines(run: str | Path, number: int, on_message: Callable[[str], None]) -> Engines:
    """Request a number of engines from a running run, and wait until the run has read the request.

    Args:
        run: the run folder.
        number: of engines.
        on_message: prints what is awaited and the time limit.

    Returns:
        The engines at that time; some may still be starting or draining.

    Raises:
        ConfigError: the number is out of range.
        RunFolderError: as `engines_of`; or the run ended, or did not read the request in time.
    """
    _checked(number)
    engines_of(run)
    folder, id = RunFolder.open(run), uuid.uuid4().hex
    folder.write_json(folder.scale_request, {"id": id, "engines": number})
    on_message(f"waiting for run {run} to read the request, at most {READ_S:g} s")
    ends_s = time.monotonic() + READ_S
    while (found := _answer(status := read_status(run), id)) is None:
        if status.engines is None:
            raise RunFolderError(f"run {run} ended before it read the request for {number} engines")
        if time.monotonic() > ends_s:
            folder.scale_request.unlink(missing_ok=True)
            raise RunFolderError(
                f"run {run} did not read the request for {number} engines within {READ_S:g} s, and will not; "
                f"see what it waits for with: millrace status {run}"
            )
        time.sleep(POLL_S)
    return found


def _answer(status: Status, id: str) -> Engines | None:
    """The engines, once the run has read this request."""
    return status.engines if status.engines is not None and status.engines.last_request == id else None


def _checked(number: int) -> int:
    if number < 1:
        raise ConfigError(f"{number} engines generate nothing; ask for 1 or more, or end the run with Ctrl-C")
    return number
