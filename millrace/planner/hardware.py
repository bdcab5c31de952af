"""Specifications of accelerators, from their vendors.

Dense rates (no sparsity), products accumulated in float32, memory in units of 10^9 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from millrace.errors import PlanError, did_you_mean


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, in bytes, bytes and operations per second; `devices` are its driver's names.

    `float32_flops` are not those of TF32, which torch does not use by itself.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    bfloat16_flops: float
    float32_flops: float
    source: str
    devices: tuple[str, ...]

    def flops(self, compute_bytes: int) -> float:
        """Operations per second of products of numbers of so many bytes."""
        return self.bfloat16_flops if compute_bytes == 2 else self.float32_flops


def _gpu(name: str, numbers: tuple[float, float, float, float], source: str, *devices: str) -> Gpu:
    """From GB, TB/s, and TFLOP/s of bfloat16 and float32."""
    memory, bandwidth, bfloat16, float32 = numbers
    return Gpu(name, memory * 1e9, bandwidth * 1e12, bfloat16 * 1e12, float32 * 1e12, source, devices)


_A100, _A100_40 = "NVIDIA A100 datasheet, 80 GB SXM", "NVIDIA A100 datasheet, 40 GB"
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", (80, 2.039, 312, 19.5), _A100, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        _gpu("A100-40GB", (40, 1.555, 312, 19.5), _A100_40, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        _gpu("H100", (80, 3.35, 989, 67), "NVIDIA H100 datasheet, SXM", "NVIDIA H100 80GB HBM3"),
        _gpu("H200", (141, 4.8, 989, 67), "NVIDIA H200 datasheet, SXM", "NVIDIA H200"),
        _gpu("B200", (180, 8.0, 2250, 75), "NVIDIA DGX B200 datasheet, an eighth of it", "NVIDIA B200"),
        _gpu("L40S", (48, 0.864, 362, 91.6), "NVIDIA L40S datasheet", "NVIDIA L40S"),
        _gpu("L4", (24, 0.3, 121, 30.3), "NVIDIA L4 datasheet", "NVIDIA L4"),
        _gpu("3090", (24, 0.936, 71, 35.6), "NVIDIA GA102 whitepaper", "NVIDIA GeForce RTX 3090"),
        _gpu("4090", (24, 1.008, 165.2, 82.6), "NVIDIA Ada whitepaper", "NVIDIA GeForce RTX 4090"),
        _gpu("5090", (32, 1.792, 209.5, 104.8), "NVIDIA RTX Blackwell whitepaper", "NVIDIA GeForce RTX 5090"),
    )
}
# Bytes per number, by the dtype of the rates in the table.
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


def peak_flops(device: str, dtype: str) -> float | None:
    """Operations per second of products in a dtype, by the driver's name of the device; None if unknown."""
    gpu = next((gpu for gpu in GPUS.values() if device in gpu.devices), None)
    return None if gpu is None or dtype not in NUMBER_BYTES else gpu.flops(NUMBER_BYTES[dtype])


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """`8xH200` to 8 and the H200, upper or lower case, with or without RTX; PlanError for any other form."""
    match = re.fullmatch(r"\s*([1-9]\d*)\s*[xX*]\s*(\S.*?)\s*", text)
    if match is None:
        raise PlanError(
            f"--gpus is {text!r}; write how many, x, and which, such as 8xH200 (there are: {', '.join(GPUS)})"
        )
    name = re.sub(r"^RTX[ _-]?", "", match[2].upper())
    if name not in GPUS:
        hint = did_you_mean(name, list(GPUS))
        raise PlanError(f"--gpus {text}: there is no accelerator {match[2]} in the table; {hint}")
    return int(match[1]), GPUS[name]
