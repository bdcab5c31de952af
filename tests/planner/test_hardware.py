"""The table of accelerators is found by name and holds what their makers state."""

from __future__ import annotations

import pytest

from millrace.errors import PlanError
from millrace.planner.hardware import GPUS, parse_gpus, peak_flops
from tests.close import close_fp64


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xH200", 8, "H200"),
        (" 16 X a100-40gb ", 16, "A100-40GB"),
        ("1*RTX 4090", 1, "4090"),
        ("2xrtx5090", 2, "5090"),
    ],
)
def test_accelerators_are_read(text, count, name):
    assert parse_gpus(text) == (count, GPUS[name])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "H200",
            f"--gpus is 'H200'; write how many, x, and which, such as 8xH200 (there are: {', '.join(GPUS)})",
        ),
        (
            "0xH200",
            "--gpus is '0xH200'; write how many, x, and which, such as 8xH200 "
            f"(there are: {', '.join(GPUS)})",
        ),
        ("8xH20O", "--gpus 8xH20O: there is no accelerator H20O in the table; did you mean H200?"),
        (
            "8xTPUv5",
            f"--gpus 8xTPUv5: there is no accelerator TPUv5 in the table; there are: {', '.join(GPUS)}",
        ),
    ],
)
def test_an_unknown_accelerator_is_refused(text, sentence):
    with pytest.raises(PlanError) as refused:
        parse_gpus(text)
    assert str(refused.value) == sentence


def test_an_h200_is_what_its_datasheet_says():
    gpu = GPUS["H200"]
    close_fp64([gpu.memory_bytes, gpu.bandwidth], [141e9, 4.8e12])
    close_fp64([gpu.flops(2), gpu.flops(4)], [989e12, 67e12])


def test_no_entry_is_out_of_the_range_of_its_kind():
    # A slip of a thousand in any column would show.
    for gpu in GPUS.values():
        assert 20e9 < gpu.memory_bytes < 200e9
        assert 0.2e12 < gpu.bandwidth <= 8e12
        assert 1.5 < gpu.bfloat16_flops / gpu.float32_flops < 35
        assert 15e12 < gpu.float32_flops < 110e12
        assert gpu.source


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H200", "float32", 67e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA H200", "float64", None),
        # A slice, and a card with other rates than the one of the table.
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16", None),
        ("NVIDIA H100 PCIe", "bfloat16", None),
    ],
)
def test_the_peak_is_found_by_the_drivers_name(device, dtype, expected):
    assert peak_flops(device, dtype) == expected


def test_no_name_of_the_driver_is_of_two_accelerators():
    names = [name for gpu in GPUS.values() for name in gpu.devices]
    assert len(set(names)) == len(names) >= len(GPUS)
