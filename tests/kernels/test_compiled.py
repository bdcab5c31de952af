from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millrace.kernels import compiled as kernels
from millrace.kernels.compiled import (
    NUMBERS,
    array,
    compiled,
    exponential,
    memory,
    narrow,
    number_of,
    put,
    put_all,
    readable,
    room,
    wide,
)
from tests.close import close_fp64


class Special(torch.Tensor):
    pass


def test_every_bfloat16_is_widened_to_its_own_number() -> None:
    bits = torch.arange(0, 1 << 16, 5, dtype=torch.int32)
    expected = (bits << 16).view(torch.float32)
    ours = torch.tensor([wide(np.uint16(one)) for one in bits.tolist()], dtype=torch.float32)
    assert len(ours) == 13108
    assert torch.equal(ours.nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5))


def test_a_float32_is_rounded_to_the_nearest_bfloat16_and_ties_to_the_even_one() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(2000, generator=generator) * (torch.randn(2000, generator=generator) * 10).exp()
    ties = (spread.bfloat16().float().view(torch.int32) + 0x8000).view(torch.float32)
    near = (spread.bfloat16().float().view(torch.int32) + 0x7FFF).view(torch.float32)
    beyond = (spread.bfloat16().float().view(torch.int32) + 0x8001).view(torch.float32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38])
    x = torch.cat([spread, ties, near, beyond, special])
    ours = torch.from_numpy(np.array([narrow(one) for one in x.numpy()], dtype=np.uint16))
    assert torch.equal(ours.to(torch.int32), x.bfloat16().view(torch.uint16).to(torch.int32))
    # Whatever else its bits say.
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF):
        assert narrow(np.array(bits, np.uint32).view(np.float32)[()]) == 0x7FC0


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ((torch.zeros(2), torch.nn.Parameter(torch.zeros(3))), True),
        ((torch.zeros(2), torch.zeros(2, dtype=torch.float64)), False),
        ((torch.zeros(2), torch.zeros(2, device="meta")), False),
        ((torch.zeros(2).as_subclass(Special),), False),
    ],
)
def test_only_plain_memory_on_the_cpu_of_one_dtype_is_read(tensors: Any, expected: bool) -> None:
    assert readable(*tensors) is expected


def test_an_array_is_the_memory_of_its_tensor() -> None:
    x = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    assert array(x).tolist() == [[0x3FC0, 0xC000], [0x3E80, 0x4040]]
    y = torch.arange(6.0).view(2, 3)
    array(y)[1, 2] = 7.0
    assert y[1, 2] == 7.0
    assert array(y.T).tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 7.0]]


@compiled()
def doubled_in_place(address: int, shape: Any, number: Any) -> float:
    """Double each number of a matrix; gives back the sum before, each row as often as its number says."""
    x = memory(address, shape, number)
    total = 0.0
    for i in range(shape[0]):
        for k in range(shape[1]):
            total += (i + 1) * number_of(x[i, k])
            put(x[i], k, np.float32(2 * number_of(x[i, k])))
    return total


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_memory_at_an_address_is_read_and_written_as_its_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.5, -2.0, 8.0], [0.25, 3.0, 0.5]], dtype=dtype)
    doubled = x * 2
    assert doubled_in_place(x.data_ptr(), (2, 3), NUMBERS[dtype]) == 7.5 + 2 * 3.75
    assert torch.equal(x, doubled)


@pytest.mark.parametrize("target", NUMBERS)
@pytest.mark.parametrize("source", NUMBERS)
def test_numbers_are_written_as_the_array_keeps_them(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.tensor([1.00390625, -3.0, 1.01171875, 9.0]).to(source)
    y = torch.full((4,), 7.0, dtype=target)
    put_all(array(y)[:3], array(x))
    assert torch.equal(y, torch.cat([x[:3].to(target), y.new_tensor([7.0])]))


@compiled()
def squares(shape: Any, number: Any) -> Any:
    """Two rooms of their own, of which the first holds squares and the second another number."""
    x, y = room(shape, number), room(shape, number)
    for i in range(shape[0]):
        for k in range(shape[1]):
            put(x[i], k, np.float32((3 * i + k) ** 2))
            put(y[i], k, np.float32(0.5))
    return x


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_room_holds_numbers_of_its_kind_and_is_nobody_elses(dtype: torch.dtype) -> None:
    x = squares((2, 3), NUMBERS[dtype])
    assert torch.equal(torch.from_numpy(x).view(dtype), torch.tensor([[0, 1, 4], [9, 16, 25]], dtype=dtype))


def test_the_exponential_is_exact_to_rounding_and_0_or_nan_where_it_should_be() -> None:
    for x in [0.0, -1e-12, -0.3, -0.35, 0.3465, 1.0, -1.0, -87.4, -699.9, -700.0, 12.3, 690.0]:
        close_fp64(float(exponential(x)), math.exp(x), rtol=5e-16, atol=0)
    for x in np.random.default_rng(0).uniform(-30, 30, 200).tolist():
        close_fp64(float(exponential(x)), math.exp(x), rtol=5e-16, atol=0)
    assert exponential(-700.1) == 0 and exponential(-math.inf) == 0
    assert math.isnan(exponential(math.nan))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("length", "expected"), [(0, []), (3, [2, 0, 1]), (11, [4, 0, 0, 0, 4, 0, 0, 0, 2, 0, 1])]
)
def test_a_length_is_gone_through_in_large_steps_and_then_in_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, length: int, expected: list[int]
) -> None:
    # Also where kernels run as Python: only here is the generated code looked at.
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)

    @intrinsic
    def write_sizes(context: Any, sizes: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = target.make_array(signature.args[0])(target, builder, arguments[0])
            (length,) = cgutils.unpack_tuple(builder, array.shape, 1)
            for size, index in kernels.steps(builder, length, (4, 2, 1)):
                builder.store(ir.Constant(length.type, size), builder.gep(array.data, [index]))
            return target.get_dummy_value()

        return types.void(sizes), generate

    size_N = np.zeros(length, np.int64)
    numba.njit(lambda sizes: write_sizes(sizes))(size_N)
    assert size_N.tolist() == expected


@pytest.mark.slow
def test_machine_code_on_the_disk_is_not_used_when_a_function_or_what_it_calls_has_changed(
    tmp_path: Path,
) -> None:
    package = tmp_path / "copied"
    package.mkdir()
    shutil.copy(kernels.__file__, package / "compiled.py")
    decorated = "from copied.compiled import compiled\n{}\n@compiled()\ndef {}(x):\n    return {}\n"
    told = "from outside import outer; print(outer(2), *outer.stats.cache_hits.values())"
    printed = []
    for inner, outer in (("x + 1", ""), ("x + 1", ""), ("x * 5", ""), ("x * 5", " + 3")):
        (package / "inner.py").write_text(decorated.format("", "inner", inner))
        code = decorated.format("from copied.inner import inner", "outer", f"inner(x){outer}")
        # Only a file that is written anew is another one.
        if not (tmp_path / "outside.py").exists() or outer:
            (tmp_path / "outside.py").write_text(code)
        words = [sys.executable, "-c", told]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        printed.append(done.stdout.split())
    assert printed == [["3"], ["3", "1"], ["10"], ["13"]]


def test_without_a_folder_for_machine_code_each_process_compiles_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def njit(**options: Any) -> Callable[[Any], Any]:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    monkeypatch.setattr(kernels, "njit", njit)
    assert kernels.compiled("contract")(len) == ("compiled", len)
    # Only machine code without the interpreter's lock runs on several threads.
    plain = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy", "inline": "never"}
    assert asked == [plain | {"cache": True}, plain]
