from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from millrace.kernels import compiled as kernels
from millrace.kernels.compiled import NUMBERS, array, compiled, memory, narrow, number_of, put, readable, wide


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
    assert np.isnan(wide(np.uint16(narrow(np.float32(np.nan)))))


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


@pytest.mark.parametrize("dtype", NUMBERS)
def test_memory_at_an_address_is_read_and_written_as_its_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.5, -2.0, 8.0], [0.25, 3.0, 0.5]], dtype=dtype)
    doubled = x * 2
    assert doubled_in_place(x.data_ptr(), (2, 3), NUMBERS[dtype]) == 7.5 + 2 * 3.75
    assert torch.equal(x, doubled)


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
    plain = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    assert asked == [plain | {"cache": True}, plain]
