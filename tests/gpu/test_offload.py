"""What leaves a GPU's memory really leaves it, and comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.distributed.fsdp import spare_activations
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


class Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x_TD: Tensor) -> Tensor:
        return torch.sin(torch.relu(self.linear(x_TD)))


@pytest.mark.gpu
def test_what_layers_keep_for_the_backward_leaves_a_gpu() -> None:
    torch.manual_seed(0)
    model, x_TD = nn.Sequential(Layer(), Layer()).cuda(), torch.randn(4096, 1024, device="cuda")
    held, slopes = [], []
    for offload in (False, True):
        spare_activations(model, "none", offload=offload)
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        result_TD = model(x_TD)
        held.append(torch.cuda.memory_allocated() - before)
        result_TD.sum().backward()
        slopes.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        del result_TD
    assert held[1] < 0.5 * held[0]
    assert all(torch.equal(*pair) for pair in zip(*slopes, strict=True))
