"""What accelerators can do, as their makers say.

Dense rates (no sparsity), products accumulated in float32, memory in units of 10^9 bytes.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from millrace.planner.errors import PlanError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator.

    Attributes:
        name: as it is called here.
        memory_bytes: of the device.
        bandwidth: bytes per second of its memory.
        bfloat16_flops: operations per second of bfloat16 products.
        float32_flops: of float32 products (not TF32, which torch does not use by itself).
        source: who says so.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    bfloat16_flops: float
    float32_flops: float
    source: str

    def flops(self, compute_bytes: int) -> float:
        """Operations per second of products of numbers of so many bytes."""
        return self.bfloat16_flops if compute_bytes == 2 else self.float32_flops


def _gpu(name: str, memory: float, bandwidth: float, bfloat16: float, float32: float, source: str) -> Gpu:
    """From GB, TB/s and TFLOP/s."""
    return Gpu(name, memory * 1e9, bandwidth * 1e12, bfloat16 * 1e12, float32 * 1e12, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 80, 2.039, 312, 19.5, "NVIDIA A100 datasheet, 80 GB SXM"),
        _gpu("A100-40GB", 40, 1.555, 312, 19.5, "NVIDIA A100 datasheet, 40 GB"),
        _gpu("H100", 80, 3.35, 989, 67, "NVIDIA H100 datasheet, SXM"),
        _gpu("H200", 141, 4.8, 989, 67, "NVIDIA H200 datasheet, SXM"),
        _gpu("B200", 180, 8.0, 2250, 75, "NVIDIA DGX B200 datasheet, an eighth of it"),
        _gpu("L40S", 48, 0.864, 362, 91.6, "NVIDIA L40S datasheet"),
        _gpu("L4", 24, 0.3, 121, 30.3, "NVIDIA L4 datasheet"),
        _gpu("3090", 24, 0.936, 71, 35.6, "NVIDIA GA102 whitepaper"),
        _gpu("4090", 24, 1.008, 165.2, 82.6, "NVIDIA Ada whitepaper"),
        _gpu("5090", 32, 1.792, 209.5, 104.8, "NVIDIA RTX Blackwell whitepaper"),
    )
}


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """`8xH200` to 8 and the H200; upper or lower case, with or without RTX.

    Raises:
        PlanError: it is not of that form, or the accelerator is not one of `GPUS`.
    """
    match = re.fullmatch(r"\s*([1-9]\d*)\s*[xX*]\s*(\S.*?)\s*", text)
    if match is None:
        raise PlanError(
            f"--gpus is {text!r}; write how many, x, and which, such as 8xH200 (there are: {', '.join(GPUS)})"
        )
    name = re.sub(r"^RTX[ _-]?", "", match[2].upper())
    if name not in GPUS:
        near = difflib.get_close_matches(name, GPUS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(GPUS)}"
        raise PlanError(f"--gpus {text}: there is no accelerator {match[2]} in the table; {hint}")
    return int(match[1]), GPUS[name]
