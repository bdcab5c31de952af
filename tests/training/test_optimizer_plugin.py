"""An optimizer of a user's own: its steps, its state in checkpoints, and what it must not do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from millrace.data.plugin import PluginError
from millrace.errors import SetupError
from millrace.training.optimizer import (
    WeightOptimizer,
    optimizer_step,
    optimizer_tensors,
    start_optimizer,
    weight_groups,
)
from millrace.training.optimizer_plugin import OptimizerPlugin
from tests.close import close_fp64

HERE = "tests.plugin_functions"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def made(model: nn.Module, name: str = "sgd") -> OptimizerPlugin:
    return OptimizerPlugin(f"{HERE}:{name}", weight_groups(model, 0.0), betas=(0.9, 0.99), weight_decay=0.0)


def step(optimizer: WeightOptimizer, model: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)

    def norms(rows):
        return [math.sqrt(sum(float((p.grad**2).sum()) for p in row)) for row in rows]

    return optimizer_step(optimizer, learning_rate=0.1, max_grad_norm=9.0, metrics={}, norms=norms)


def test_it_moves_the_weights_at_the_learning_rate_of_the_schedule():
    ours, theirs, before = small(), small(), small()
    report = step(made(ours), ours)
    by_hand = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(0)
    for weight in theirs.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    by_hand.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert set(report.metrics) == {
        f"{what}_norm_{kind}" for what in ("grad", "update") for kind in ("matrices", "vectors")
    }
    moved = (ours.weight - before.weight).norm()
    close_fp64(report.metrics["update_norm_matrices"], moved)


def test_its_state_goes_through_a_checkpoint():
    straight, resumed = small(), small()
    first, second = made(straight), made(resumed)
    step(first, straight)
    resumed.load_state_dict(straight.state_dict())
    saved = optimizer_tensors(first, straight)
    assert sorted(saved) == ["momentum_buffer/bias", "momentum_buffer/weight"]
    into = start_optimizer(second, resumed)
    # To make the state moves nothing.
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    for name, tensor in into.items():
        tensor.copy_(saved[name])
    step(first, straight, seed=1)
    step(second, resumed, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "module tests.plugin_functions does not have a function gone"),
        ("too_few", "has a parameter reward_N, and inputs are passed by name: groups, betas, weight_decay"),
        ("failing", "raised KeyError: 'lr' (plugin_functions.py line"),
        ("no_optimizer", "returned a list; return a torch.optim.Optimizer over groups"),
        ("half", "returned an optimizer of 1 weights, and 2 are trained; make it over all of groups"),
    ],
)
def test_what_makes_no_optimizer_is_refused_at_the_start(name, message):
    with pytest.raises(SetupError) as caught:
        made(small(), name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("failing_step", "raised ZeroDivisionError: by hand (plugin_functions.py line"),
        ("exploding", "left a weight that is not finite, from finite gradients; lower policy.optimizer.lea"),
        ("counting", "keeps count of a weight as a int, and checkpoints hold tensors; make it a tensor"),
    ],
)
def test_a_step_that_cannot_be_gone_on_from_is_refused(name, message):
    model = small()
    with pytest.raises(PluginError) as caught:
        step(made(model, name), model)
    assert f"policy.optimizer.kind {HERE}:{name} {message}" in str(caught.value)
