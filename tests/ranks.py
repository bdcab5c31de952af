"""A function run by several processes at once, for tests of what ranks compute together."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.forked import process

# A hang, not slowness: at a load of 48 the first ranks of a file started after 97 s.
LIMIT_S = 500.0
# Before the time runs out, a rank that hangs writes down where.
LAST_WORDS_S = 2.0


def run_ranks(
    num_ranks: int,
    function: Callable[..., dict[str, Tensor] | None],
    *args: Any,
    timeout_s: float = LIMIT_S,
) -> list[dict[str, Tensor]]:
    """Call `function(rank, *args)` in `num_ranks` processes joined by gloo, and give what each returned.

    Args:
        num_ranks: processes, each with one torch thread.
        function: of a module, so that a process can import it. The process group exists when it is called.
        args: handed to every rank; plain values and paths.
        timeout_s: after which everything is killed.

    Returns:
        Each rank's tensors, by rank; a rank that returned None gives none.

    Raises:
        AssertionError: a rank failed, with the traceback of the first that did, or the time ran out, with
            what each rank was doing.
    """
    ends = time.time() + timeout_s
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = list[ForkServerProcess]()
        try:
            for rank in range(num_ranks):
                processes.append(process(_rank, rank, num_ranks, folder, ends, function, args))
            _await(processes, folder, ends)
        finally:
            for started in processes:
                started.kill()
                started.join()
        return [load_file(folder / f"{rank}.safetensors") for rank in range(num_ranks)]


def cases_of(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """What the tests of a run ask of a fixture that computes all their cases at once.

    Args:
        request: of the fixture.
        names: of the tests' parameters.

    Returns:
        The values of these parameters, in order and each once, of the tests that use the fixture with its own
        parameter: those that are selected, so that a case which runs elsewhere costs nothing. Tuples where
        there are several names.
    """
    found = list[Any]()
    for item in request.session.items:
        called = getattr(item, "callspec", None)
        if called is None or item.path != request.path or request.fixturename not in item.fixturenames:
            continue
        own = called.params.get(request.fixturename) == getattr(request, "param", None)
        if own and called.params.keys() >= set(names):
            found.append(called.params[names[0]] if len(names) == 1 else tuple(map(called.params.get, names)))
    return [case for place, case in enumerate(found) if case not in found[:place]]


def _await(processes: Sequence[ForkServerProcess], folder: Path, ends: float) -> None:
    left = dict(enumerate(processes))
    while left:
        ended = wait([one.sentinel for one in left.values()], ends - time.time())
        if not ended:
            told = "\n".join(f"{path.stem}: {path.read_text()}" for path in sorted(folder.glob("*.hung")))
            raise AssertionError(f"ranks {sorted(left)} were still running when the time ran out\n{told}")
        for rank, one in list(left.items()):
            if one.sentinel not in ended:
                continue
            one.join()
            if one.exitcode:
                raise AssertionError(_first_failure(folder, rank, one.exitcode))
            del left[rank]


def _first_failure(folder: Path, rank: int, exitcode: int) -> str:
    """Of the ranks that left a traceback the first: the others failed because it was gone."""
    left = sorted(folder.glob("*.failed"), key=lambda path: path.stat().st_mtime_ns)
    if not left:
        return f"rank {rank} ended with exit code {exitcode}"
    return f"rank {left[0].stem} failed\n{left[0].read_text()}"


def _rank(
    rank: int,
    num_ranks: int,
    folder: Path,
    ends: float,
    function: Callable[..., dict[str, Tensor] | None],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with (folder / f"{rank}.hung").open("w") as hung:
        left_s = max(ends - time.time(), 1.0)
        faulthandler.dump_traceback_later(max(left_s - LAST_WORDS_S, 1.0), file=hung)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / "store"), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=left_s),
            )
            tensors = function(rank, *args) or {}
            save_file(
                {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
                folder / f"{rank}.safetensors",
            )
            # Nobody leaves while another still talks to it.
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            # Renamed when whole, so that who reads it reads all of it; at once, since the others fail next.
            (folder / f"{rank}.text").write_text(traceback.format_exc())
            (folder / f"{rank}.text").rename(folder / f"{rank}.failed")
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
