"""Processes of tests, forked from a server that has imported what they need.

One that `subprocess` starts imports torch and transformers first, which takes seconds. Each process here is
named after what it is and after the process that asked for it, of which it would be a child otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from functools import partial
from io import FileIO
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from millrace.cli.main import main
from millrace.engines import disaggregated_worker, engine_worker, prefill_decode_worker, server_worker
from millrace.launchers import local_ranks
from millrace.processes import child, worker

ROOT = Path(__file__).parents[1]
PRELOADED = ["tests.preloaded"]
COMMAND = ("-m", "millrace.cli.main")
ENGINE = "engine"


def start_server() -> None:
    """Start the server of this process, unless it has one; it imports on while this process goes on.

    All that is forked has the environment of this moment, so no test may have changed it yet.
    """
    context, server = multiprocessing.get_context("forkserver"), forkserver._forkserver
    context.set_forkserver_preload(PRELOADED)
    if server._forkserver_address is None:
        # Where the server starts it finds `tests`; it says nothing where it does not.
        with chdir(ROOT):
            server.ensure_running()


def process(function: Callable[..., Any], *args: Any, name: str = "forked") -> ForkServerProcess:
    """Start a process that calls a function."""
    start_server()
    context, server = multiprocessing.get_context("forkserver"), forkserver._forkserver
    made = context.Process(
        target=_begin, args=(server._forkserver_address, f"{name} {os.getpid()}", function, args)
    )
    made.start()
    return made


def _begin(address: str, name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    assert PRELOADED[0] in sys.modules, "the server has imported nothing"
    # What this process starts comes from the same server, since a process with threads cannot be forked.
    server = forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = lambda: None
    Path("/proc/self/comm").write_text(name)
    function(*args)


class Forked:
    """A function in a process of its own; otherwise as `subprocess.Popen`.

    Attributes:
        pid: of the process.
        output: descriptors of what it prints, and of its errors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str,
        output: tuple[int, int] | None = None,
        pass_fds: Sequence[int] = (),
        new_session: bool = False,
    ) -> None:
        """Start it; each of `pass_fds` is an argument too, by the number that it has there."""
        self.output = output or (os.memfd_create("out"), os.memfd_create("err"))
        given = [_Descriptor(fd) for fd in (*self.output, *pass_fds)]
        self._process = process(_serve, function, args, new_session, *given, name=name)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it has printed, once it has ended; asked for once."""
        self.wait(timeout)
        told = []
        for descriptor in self.output:
            os.lseek(descriptor, 0, os.SEEK_SET)
            with open(descriptor, encoding="utf-8") as file:
                told.append(file.read())
        return told[0], told[1]


class _Descriptor:
    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _received, (reduction.DupFd(self._number),)


def _received(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


def _serve(
    function: Callable[..., Any], args: Sequence[Any], session: bool, out: int, err: int, *fds: int
) -> None:
    if session:
        os.setsid()
    for number, at in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(number, at)
        os.close(number)
    function(*args, *fds)


# ---- commands and ranks


def command(words: Sequence[str], **variables: str) -> Forked:
    """Start `millrace` with these words and more variables; its ranks and its engines are forked too."""
    return Forked(_command, list(words), {**os.environ, **variables}, name="command")


def run(words: Sequence[str], limit_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command, until it ends; killed where it takes longer."""
    started = command(words, **variables)
    try:
        out, err = started.communicate(limit_s)
        return subprocess.CompletedProcess(words, started.wait(), out, err)
    finally:
        started.kill()


def _command(words: Sequence[str], environment: Mapping[str, str]) -> None:
    sys.argv = ["millrace", *words]
    sys.orig_argv = [sys.executable, *COMMAND, *words]
    _start_in(environment)
    assert hasattr(local_ranks, "_start")
    local_ranks._start = _start_rank
    fork_engines()
    main()


def _start_in(environment: Mapping[str, str]) -> None:
    """As Python starts with these variables."""
    os.environ.clear()
    os.environ.update(environment)
    for folder in environment.get("PYTHONPATH", "").split(os.pathsep):
        if (path := Path(folder, "sitecustomize.py")).is_file():
            runpy.run_path(str(path))


def _start_rank(command: Sequence[str], own: Mapping[str, str], log: IO[bytes] | None) -> Forked:
    output = (1, 2) if log is None else (log.fileno(), log.fileno())
    assert tuple(command[1:3]) == COMMAND
    return Forked(_command, list(command[3:]), dict(own), name=f"rank{own['RANK']}", output=output)


# ---- engines


def fork_engines() -> None:
    """Have this process fork its engines."""
    child.subprocess = _subprocess(_Engine)


@contextmanager
def forked_engines() -> Iterator[list[Forked]]:
    """Meanwhile this process forks its engines; those that it has started."""
    started: list[Forked] = []

    def start(*given: Any, **options: Any) -> Forked:
        started.append(_Engine(*given, **options))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "subprocess", _subprocess(start))
        yield started


def _subprocess(start: Callable[..., Forked]) -> Any:
    """As the module, except that what inherits the weights, an engine, is started so."""

    def popen(command: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> Any:
        begin = start if len(pass_fds) >= 2 else subprocess.Popen
        return begin(command, pass_fds=pass_fds, **options)

    return SimpleNamespace(
        Popen=popen,
        PIPE=subprocess.PIPE,
        STDOUT=subprocess.STDOUT,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


class _Engine(Forked):
    """An engine, which has ended when its keeper has, as where the keeper has started it."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> None:
        lifeline, *given = pass_fds
        read_end, write_end = os.pipe()
        self.stdout = FileIO(read_end)
        super().__init__(
            _engine,
            dict(env),
            name=ENGINE,
            output=(write_end, write_end),
            pass_fds=(stdin, *given),
            new_session=True,
        )
        os.close(write_end)
        folder = command[command.index(str(lifeline)) + 1]
        self._keeper = process(_keep, self.pid, folder, _Descriptor(lifeline), name="keeper")

    def poll(self) -> int | None:
        return None if self._keeper.exitcode is None else super().poll()

    def wait(self, timeout: float | None = None) -> int:
        self._keeper.join(timeout)
        return super().wait(timeout)


def _engine(environment: Mapping[str, str], connection: int, weights: int, *slots: int) -> None:
    _start_in(environment)
    os.dup2(connection, 0)
    os.close(connection)
    # Its descriptors have other numbers than where they come from.
    for module in (disaggregated_worker, engine_worker, prefill_decode_worker, server_worker):
        module.serve = partial(_serve_weights, module.serve, weights, slots)
    fork_engines()  # an engine may start workers
    worker.main()


def _serve_weights(
    serve: Callable[..., None],
    weights: int,
    slots: Sequence[int],
    channel: worker.WorkerChannel,
    settings: Mapping[str, Any],
) -> None:
    serve(channel, {**settings, "weights": weights, "slots": slots})


def _keep(engine: int, folder: str, lifeline: int) -> None:
    """End an engine with all its processes once the lifeline's other end closes."""
    poll = select.poll()
    poll.register(lifeline, 0)
    poll.register(os.pidfd_open(engine), select.POLLIN)
    poll.poll()
    with suppress(ProcessLookupError):
        os.killpg(engine, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
