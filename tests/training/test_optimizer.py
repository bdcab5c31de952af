"""AdamW over named weights, and its state as tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from millrace.training.optimizer import (
    WeightOptimizer,
    adamw,
    optimizer_step,
    optimizer_tensors,
    start_optimizer,
)
from tests.close import close_bf16, close_fp64
from tests.training.pieces import tiny_model

BETAS = (0.9, 0.95)


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        set_gradients(model, seed)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (seed + 1)
        optimizer.step()


def test_it_is_adamw_with_decay_of_matrices_alone():
    ours, by_hand = small(), small()
    train(ours, adamw(ours, betas=BETAS, weight_decay=0.1), range(5))

    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in by_hand.named_parameters()}
    for seed in range(5):
        set_gradients(by_hand, seed)
        rate = 0.01 * (seed + 1)
        with torch.no_grad():
            for name, weight in by_hand.named_parameters():
                first, second = moments[name]
                first.mul_(BETAS[0]).add_((1 - BETAS[0]) * weight.grad)
                second.mul_(BETAS[1]).add_((1 - BETAS[1]) * weight.grad**2)
                weight.mul_(1 - rate * (0.1 if weight.ndim == 2 else 0.0))
                unbiased = first / (1 - BETAS[0] ** (seed + 1))
                spread = (second / (1 - BETAS[1] ** (seed + 1))).sqrt() + 1e-8
                weight.sub_(rate * unbiased / spread)
    for (name, found), expected in zip(ours.named_parameters(), by_hand.parameters(), strict=True):
        close_fp64(found, expected)
        assert name


def test_it_is_torchs_own_adamw_with_two_groups():
    ours, theirs = tiny_model(), tiny_model()
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    assert len(matrices) > 0 and len(vectors) > 0
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    train(theirs, torch.optim.AdamW(groups, betas=BETAS, fused=True), range(3))
    train(ours, adamw(ours, betas=BETAS, weight_decay=0.1), range(3))
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_before_the_first_step_there_is_no_state():
    model = small()
    assert optimizer_tensors(adamw(model, betas=BETAS, weight_decay=0.0), model) == {}


def test_a_state_of_zeros_is_that_of_an_optimizer_before_its_first_step():
    straight, started = small(), small()
    optimizers = [adamw(model, betas=BETAS, weight_decay=0.1) for model in (straight, started)]
    zeros = start_optimizer(optimizers[1], started)
    assert all(not tensor.any() for tensor in zeros.values())
    train(straight, optimizers[0], range(3))
    train(started, optimizers[1], range(3))
    expected = optimizer_tensors(optimizers[0], straight)
    assert list(zeros) == list(expected)
    for name, tensor in optimizer_tensors(optimizers[1], started).items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    for found, weight in zip(started.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, weight)


def test_the_state_goes_through_tensors_and_the_next_steps_are_bit_equal():
    straight, resumed = small(), small()
    optimizer = adamw(straight, betas=BETAS, weight_decay=0.1)
    train(straight, optimizer, range(3))
    tensors = optimizer_tensors(optimizer, straight)
    assert sorted(tensors)[:3] == ["exp_avg/0.bias", "exp_avg/0.weight", "exp_avg/1.bias"]
    assert float(tensors["step/0.weight"]) == 3

    resumed.load_state_dict(straight.state_dict())
    fresh = adamw(resumed, betas=BETAS, weight_decay=0.1)
    for name, tensor in start_optimizer(fresh, resumed).items():
        tensor.copy_(tensors[name])
    train(straight, optimizer, range(3, 5))
    train(resumed, fresh, range(3, 5))
    for found, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)


def alone(groups) -> list[float]:
    """The norms of one process that holds all weights."""
    return [float(torch.cat([torch.zeros(0), *(p.grad.flatten() for p in row)]).norm()) for row in groups]


def one_step(optimizer: WeightOptimizer, **more):
    options = {"learning_rate": 0.5, "max_grad_norm": 1e9, "metrics": {"loss": 2.0}, "norms": alone}
    return optimizer_step(optimizer, **options | more)


@pytest.mark.parametrize(("max_norm", "scaled"), [(0.2, True), (1e9, False)])
def test_a_step_scales_a_gradient_above_the_norm_takes_the_rate_and_clears_it(max_norm, scaled):
    model, by_hand = small(), small()
    set_gradients(model, 3)
    set_gradients(by_hand, 3)
    norm = torch.cat([p.grad.flatten() for p in by_hand.parameters()]).norm()
    optimizer = adamw(model, betas=BETAS, weight_decay=0.0)
    report = one_step(optimizer, max_grad_norm=max_norm)
    assert norm > 1
    for moved, weight in zip(model.parameters(), by_hand.parameters(), strict=True):
        seen = weight.grad * (0.2 / norm if scaled else 1)
        close_fp64(optimizer.state[moved]["exp_avg"], 0.1 * seen)
        close_fp64(moved, weight.detach() - 0.5 * seen / (seen.abs() + 1e-8))
        assert moved.grad is None
    close_fp64(report.grad_norm, norm)
    assert (report.skipped, report.learning_rate, report.metrics["loss"]) == (False, 0.5, 2.0)


def test_norms_of_gradient_and_update_are_reported_for_matrices_and_vectors():
    model = small()
    optimizer = adamw(model, betas=BETAS, weight_decay=0.3)
    kinds = {
        "matrices": [p for p in model.parameters() if p.ndim == 2],
        "vectors": [p for p in model.parameters() if p.ndim == 1],
    }
    for step in range(4):
        set_gradients(model, step)
        before = {p: p.detach().clone() for p in model.parameters()}
        expected = {
            f"grad_norm_{kind}": torch.cat([p.grad.flatten() for p in row]).norm()
            for kind, row in kinds.items()
        }
        report = one_step(optimizer, learning_rate=0.01 * (step + 1), max_grad_norm=2.0)
        for kind, row in kinds.items():
            moved = torch.cat([(p.detach() - before[p]).flatten() for p in row])
            expected[f"update_norm_{kind}"] = moved.norm()
        assert report.metrics.keys() == {"loss", *expected}
        for name, value in expected.items():
            close_fp64(report.metrics[name], value)
        close_fp64(
            report.grad_norm,
            math.hypot(expected["grad_norm_matrices"], expected["grad_norm_vectors"]),
        )


def test_the_update_of_bfloat16_is_that_of_its_float32_twin():
    """And not of the weights, which are too coarse for so small a step."""
    wide, narrow = small().float(), small().bfloat16()
    with torch.no_grad():
        for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
            one.copy_(other)
    metrics = []
    for model in (wide, narrow):
        set_gradients(model, 0)
        for parameter in model.parameters():
            parameter.grad.fill_(0.25)
        metrics.append(one_step(adamw(model, betas=BETAS, weight_decay=0.3), learning_rate=1e-5).metrics)
    for name in ("update_norm_matrices", "update_norm_vectors"):
        close_bf16(metrics[1][name], metrics[0][name], rtol=1e-2)


def test_without_vectors_their_norms_are_0():
    model = nn.Linear(3, 4, bias=False)
    optimizer = adamw(model, betas=BETAS, weight_decay=0.1)
    for seed in range(2):
        set_gradients(model, seed)
        metrics = one_step(optimizer).metrics
        assert metrics["grad_norm_vectors"] == metrics["update_norm_vectors"] == 0.0
        assert metrics["grad_norm_matrices"] > 0 and metrics["update_norm_matrices"] > 0


@pytest.mark.parametrize("metrics", [{}, {"loss": 1e30, "value": math.nan}])
def test_only_the_gradient_and_the_loss_decide_whether_it_moves(metrics):
    model = small()
    set_gradients(model, 0)
    assert not one_step(adamw(model, betas=BETAS, weight_decay=0.0), metrics=metrics).skipped


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["gradient", "loss"])
def test_a_step_that_is_not_finite_moves_nothing_and_clears_the_gradient(place, value):
    model = small()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_gradients(model, 0)
    if place == "gradient":
        model[2].bias.grad[1] = value
    optimizer = adamw(model, betas=BETAS, weight_decay=0.1)
    report = one_step(optimizer, metrics={"loss": value if place == "loss" else 1.0})
    assert report.skipped and optimizer_tensors(optimizer, model) == {}
    assert report.metrics.keys() == {"loss", "grad_norm_matrices", "grad_norm_vectors"}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_weight_without_a_gradient_moves_by_its_momentum():
    model = small()
    optimizer = adamw(model, betas=BETAS, weight_decay=0.0)
    set_gradients(model, 0)
    one_step(optimizer, learning_rate=0.01)
    before = model[2].weight.detach().clone()
    report = one_step(optimizer, learning_rate=0.01)
    assert (report.grad_norm, report.skipped) == (0.0, False)
    assert not torch.equal(model[2].weight, before)
