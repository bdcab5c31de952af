"""What leaves a GPU's memory really leaves it, and comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from millrace.training.offload import HostShelf, Offload


@pytest.mark.gpu
def test_memory_of_a_gpu_is_free_while_its_numbers_wait() -> None:
    linear = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    linear(torch.ones(2, 4096, device="cuda")).sum().backward()
    optimizer.step()
    kept = [linear.weight, linear.weight.grad, optimizer.state[linear.weight]["exp_avg"]]
    expected = [tensor.detach().cpu().clone() for tensor in kept]
    away = Offload([("the policy", linear, optimizer)], HostShelf(pinned=True), device="cuda")
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        away.sleep()
        assert before - torch.cuda.memory_allocated() >= 4 * 4096 * 4096 * 4
        away.wake()
        assert torch.cuda.memory_allocated() == before
        assert all(torch.equal(one.cpu(), other) for one, other in zip(kept, expected, strict=True))
    optimizer.step()
