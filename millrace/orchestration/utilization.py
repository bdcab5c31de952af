"""How fast a batch was trained, and against what its devices can do."""

from __future__ import annotations

import torch

from millrace.planner.flops import utilization
from millrace.planner.hardware import peak_flops


def reached(
    operations: int, seconds: float, *, num_ranks: int, device: torch.device, dtype: str
) -> dict[str, float]:
    """Metrics of a batch; `time/mfu` only where the planner knows the device's peak.

    Args:
        operations: of the forwards and backwards of policy and critic, over all ranks.
        seconds: of everything between the scored batch and the new weights.
        num_ranks: each with a device like this one.
        device: of this rank.
        dtype: of the products' factors, such as "bfloat16".
    """
    each = operations / num_ranks
    found = {"time/tflops_per_rank": each / seconds / 1e12}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = peak_flops(name, dtype)
    if peak is not None:
        found["time/mfu"] = utilization(each, seconds=seconds, peak_flops=peak)
    return found
