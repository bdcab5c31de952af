"""AdamW over named weights, and its state as tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from millrace.training.optimizer import (
    adamw,
    critic_tensors,
    load_optimizer_tensors,
    optimizer_step,
    optimizer_tensors,
    split_tensors,
)
from tests.close import close_fp32, close_fp64
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


def test_the_state_goes_through_tensors_and_the_next_steps_are_bit_equal():
    straight, resumed = small(), small()
    optimizer = adamw(straight, betas=BETAS, weight_decay=0.1)
    train(straight, optimizer, range(3))
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, straight).items()}
    assert sorted(tensors)[:3] == ["exp_avg/0.bias", "exp_avg/0.weight", "exp_avg/1.bias"]
    assert float(tensors["step/0.weight"]) == 3

    resumed.load_state_dict(straight.state_dict())
    fresh = adamw(resumed, betas=BETAS, weight_decay=0.1)
    load_optimizer_tensors(fresh, resumed, tensors)
    train(straight, optimizer, range(3, 5))
    train(resumed, fresh, range(3, 5))
    for found, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)
    # What was given stays the caller's.
    assert float(tensors["step/0.weight"]) == 3


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda t: t.pop("step/0.weight"), "the optimizer state of weight 0.weight does not fit the model"),
        (
            lambda t: t.update({"exp_avg/0.weight": torch.zeros(5, 3)}),
            "the optimizer state of weight 0.weight does not fit the model",
        ),
        (
            lambda t: t.update({"exp_avg/9.weight": torch.zeros(1)}),
            "the optimizer state names exp_avg/9.weight, which the model does not have",
        ),
    ],
)
def test_the_state_of_another_model_is_refused(spoil, sentence):
    model = small()
    optimizer = adamw(model, betas=BETAS, weight_decay=0.0)
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer, model)
    spoil(tensors)
    with pytest.raises(ValueError) as caught:
        load_optimizer_tensors(adamw(model, betas=BETAS, weight_decay=0.0), model, tensors)
    assert str(caught.value) == sentence


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, **more):
    options = {"learning_rate": 0.5, "max_gradient_norm": 1e9, "metrics": {"loss": 2.0}} | more
    return optimizer_step(model, optimizer, **options)


def test_a_step_clips_the_gradient_takes_the_rate_and_clears_it():
    model, by_hand = small(), small()
    set_gradients(model, 3)
    set_gradients(by_hand, 3)
    norm = torch.cat([p.grad.flatten() for p in by_hand.parameters()]).norm()
    report = one_step(model, torch.optim.SGD(model.parameters(), lr=9.0), max_gradient_norm=0.2)
    assert norm > 1
    for moved, weight in zip(model.parameters(), by_hand.parameters(), strict=True):
        close_fp32(moved, weight.detach() - 0.5 * 0.2 * weight.grad / norm)
        assert moved.grad is None
    close_fp64(report.gradient_norm, norm)
    assert (report.skipped, report.learning_rate, report.metrics) == (False, 0.5, {"loss": 2.0})


@pytest.mark.parametrize("metrics", [{}, {"loss": 1e30, "value": math.nan}])
def test_only_the_gradient_and_the_loss_decide_whether_it_moves(metrics):
    model = small()
    set_gradients(model, 0)
    assert not one_step(model, adamw(model, betas=BETAS, weight_decay=0.0), metrics=metrics).skipped


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["gradient", "loss"])
def test_a_step_that_is_not_finite_moves_nothing_and_clears_the_gradient(place, value):
    model = small()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_gradients(model, 0)
    if place == "gradient":
        model[2].bias.grad[1] = value
    optimizer = adamw(model, betas=BETAS, weight_decay=0.1)
    report = one_step(model, optimizer, metrics={"loss": value if place == "loss" else 1.0})
    assert report.skipped and optimizer_tensors(optimizer, model) == {}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_weight_without_a_gradient_moves_by_its_momentum():
    model = small()
    optimizer = adamw(model, betas=BETAS, weight_decay=0.0)
    set_gradients(model, 0)
    one_step(model, optimizer, learning_rate=0.01)
    before = model[2].weight.detach().clone()
    report = one_step(model, optimizer, learning_rate=0.01)
    assert (report.gradient_norm, report.skipped) == (0.0, False)
    assert not torch.equal(model[2].weight, before)


def test_the_states_of_policy_and_critic_lie_beside_each_other_and_come_apart_again():
    policy, critic = {"step/a": torch.tensor(1.0)}, {"step/a": torch.tensor(2.0), "exp_avg/b": torch.ones(3)}
    together = policy | critic_tensors(critic)
    assert sorted(together) == ["critic/exp_avg/b", "critic/step/a", "step/a"]
    own, other = split_tensors(together)
    assert (own, other.keys()) == (policy, critic.keys())
    assert all(other[name] is critic[name] for name in critic)
    assert split_tensors(policy) == (policy, {})
