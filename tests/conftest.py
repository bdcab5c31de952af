"""What every test runs under: no network, few threads, the same random examples each time."""

from __future__ import annotations

import errno
import gc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.selection import (
    EVERY_CASE,
    Guard,
    demanded_marks,
    drawn_as,
    hidden_marks,
    in_eighth,
    mark_cases,
    scope_of,
)

# Whether or not there are other workers: rounding depends on it, and ranks that tests start have one.
NUM_THREADS = 1

# Set before torch and transformers are imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", str(NUM_THREADS))
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    RAY_USAGE_STATS_ENABLED="0",
)

# Without a GPU, Triton kernels run in its interpreter, which must be asked for before anybody imports one.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# The examples depend on the test alone, and a slow machine is not a failure.
settings.register_profile(
    "house", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")

# As `millrace` does (`cli.main`): there are 400,000 objects that stay.
gc.set_threshold(50_000)


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a path: Unix socket
    host = str(address[0])
    return host in ("", "localhost", "::1", "0.0.0.0") or host.startswith("127.")


def _local_only(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if not _is_local(address):
            raise OSError(errno.ENETUNREACH, f"tests run without a network, but one asked for {address}")
        return connect(self, address)

    return guarded


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _local_only(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", _local_only(socket.socket.connect_ex))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """What computes in this process on every core it may use has one; each worker of xdist has one.

    Threads that wait for each other spin: a run of two threads beside another worker took seven times the
    processor time.
    """
    core = min(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {core})
        yield


@pytest.fixture(scope="session", autouse=True)
def _power_stays_on() -> Iterator[None]:
    """Files of tests need not outlive a loss of power; a checkpoint waits some milliseconds for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    # A test that trains may have asked for every core. Tests that never import torch stay fast.
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > NUM_THREADS:
        torch.set_num_threads(NUM_THREADS)


GUARD = Guard()


@pytest.fixture(scope="session", autouse=True)
def guarded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        GUARD.install(patch)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch a test without the mark `world` from its fixtures to its end."""
    GUARD.watch(item)
    try:
        return (yield)
    finally:
        GUARD.watch(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that was refused a process, a port or sleep, also where its code caught the exception."""
    result = yield
    GUARD.check()
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--eighth`, which the gate uses for what would take too long whole."""
    parser.addoption(
        "--eighth", metavar="SALT", help="of the slow tests an eighth, chosen by hash of the salt"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files that look at every source file to one worker; None for other orders than by file."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that do not name the marks that `-m` demands; importing all of them takes long."""
    demanded = demanded_marks(config.option.markexpr)
    if collection_path.suffix != ".py" or not all(demanded):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return not any(all(f"mark.{name}" in text for name in names) for names in demanded) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the eighth that is asked for, and have reports say which attack a test plays.

    Raises:
        pytest.UsageError: a test's file does not name its mark, and would be left out where that is demanded.
    """
    if EVERY_CASE not in os.environ:
        mark_cases(items)
    if hidden := hidden_marks(items):
        raise pytest.UsageError(f"write pytest.mark in the files of these tests: {', '.join(hidden)}")
    for item in items:
        if (attack := item.get_closest_marker("attack")) is not None:
            item.user_properties.append(("attack", attack.args[0]))
    salt = config.getoption("eighth")
    if salt is not None:
        chosen = [
            not item.get_closest_marker("slow")
            or (not item.get_closest_marker("only_whole") and in_eighth(salt, drawn_as(item)))
            for item in items
        ]
        left = [item for item, keep in zip(items, chosen, strict=True) if not keep]
        items[:] = [item for item, keep in zip(items, chosen, strict=True) if keep]
        config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Leave modules out of every garbage collection from here on, those of tests of garbage included."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Take them in again, for libraries that report at the end what was not collected."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where there is no CUDA, and start the server that forks processes of tests.

    It starts before a fixture of the first test changes the environment, which all that is forked would have.
    """
    forked = sys.modules.get("tests.forked")
    if forked is not None and any(map(item.get_closest_marker, ("world", "slow"))):
        forked.start_server()
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch.cuda finds none here")
