from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import binding

from millrace.kernels import team


def fill(value_P: Any, factor: float, part: int) -> None:
    # Not the same amount of work for each part, so that some member takes more of them.
    for _ in range(1 + 1000 * (part % 3)):
        value_P[part] += factor


def machine_code() -> Any:
    """Compiled also where kernels run as Python: only here is the generated code looked at."""
    inner = numba.njit(nogil=True)(fill)

    @numba.njit(nogil=True)
    def fill_all(value_P: Any, factor: float, num_parts: int, num_members: int) -> None:
        team.share_out(inner, (value_P, factor), num_parts, num_members)

    return fill_all


def in_python(value_P: Any, factor: float, num_parts: int, num_members: int) -> None:
    team.share_out(fill, (value_P, factor), num_parts, num_members)


@pytest.mark.slow
def test_each_part_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    for fill_all in (machine_code(), in_python):
        for num_parts, num_members in product([0, 1, 2, 7, 50], [1, 2, 3, 5]):
            value_P = np.zeros(num_parts + 1)
            fill_all(value_P, 0.5, num_parts, num_members)
            assert value_P.tolist() == [*(0.5 * (1 + 1000 * (part % 3)) for part in range(num_parts)), 0.0]


def test_work_is_cut_for_the_threads_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "num_threads", lambda: 2)
    assert [team.cuts(most) for most in (-1, 0, 1, 2, 3, 8, 9)] == [
        (1, 1),
        (1, 1),
        (1, 1),
        (2, 2),
        (3, 2),
        (8, 2),
        (8, 2),
    ]
    monkeypatch.setattr(team, "num_threads", lambda: 1)
    assert team.cuts(9) == (4, 1)


def test_the_team_is_as_large_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team.torch, "get_num_threads", lambda: 3)
    assert team.num_threads() == 3
    monkeypatch.setattr(team, "PROCESS", -1)
    assert team.num_threads() == 1
    monkeypatch.undo()
    monkeypatch.setattr(team.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(team, "_parallel", lambda: None)
    assert team.num_threads() == 1


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_of_a_whole_follow_each_other_and_are_as_long(num_parts: int) -> None:
    for total in (0, 1, 6, 7, 29):
        cuts = [team.bounds(total, num_parts, part) for part in range(num_parts)]
        assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == total
        assert {stop - start for start, stop in cuts} <= {total // num_parts, total // num_parts + 1}


def test_only_the_process_and_openmp_runtimes_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    for name in ("libomp.dylib", "libgomp.so.1", "libiomp5.so", "libbackend_with_compiler.so", "libtorch.so"):
        (library / name).touch()
    asked: list[Any] = []
    monkeypatch.setattr(team.torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(team.ctypes, "CDLL", lambda path: asked.append(path) or object())
    assert team._parallel.__wrapped__() is None
    assert asked == [None, *(str(library / name) for name in ("libgomp.so.1", "libiomp5.so", "libomp.dylib"))]


def test_the_runtime_is_given_the_members_and_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def runtime(member: int, shared: int, num_members: int, flags: int) -> None:
        told.append((num_members, flags))
        team._alone(member, shared, num_members, flags)

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    binding.add_symbol(team.SYMBOL, ctypes.cast(runtime, ctypes.c_void_p).value)
    try:
        value_P, fill_all = np.zeros(4), machine_code()
        for num_members in (1, 2, 3):
            fill_all(value_P, 0.5, 4, num_members)
    finally:
        known = team._parallel() or team._alone
        binding.add_symbol(team.SYMBOL, ctypes.cast(known, ctypes.c_void_p).value)
    assert told == [(2, 0), (3, 0)]
    assert value_P.tolist() == [1.5, 1501.5, 3001.5, 1.5]


def test_the_parts_run_on_threads_of_torchs_own_runtime() -> None:
    runtime = team._parallel()
    assert runtime is not None
    members: set[int] = set()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def member(_: int) -> None:
        members.add(ctypes.pythonapi.PyThread_get_thread_ident())

    ctypes.pythonapi.PyThread_get_thread_ident.restype = ctypes.c_ulong
    runtime(member, None, 2, 0)
    assert len(members) == 2


WITHOUT = """
import ctypes
import numba
import numpy as np
import torch
real, ctypes.CDLL = ctypes.CDLL, lambda *given, **options: object()
from millrace.kernels import team
ctypes.CDLL = real
assert team._parallel() is None and team.num_threads() == 1
from tests.kernels.test_team import machine_code
value = np.zeros(3)
machine_code()(value, 0.5, 3, 2)
print(value.tolist())
"""


@pytest.mark.slow
def test_without_a_runtime_one_thread_does_all() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "NUMBA_DISABLE_JIT": "0"},
    )
    assert done.stdout == "[0.5, 500.5, 1000.5]\n", done.stderr
