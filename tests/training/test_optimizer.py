"""AdamW over named weights, and its state as tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from millrace.training.optimizer import adamw, load_optimizer_tensors, optimizer_tensors
from tests.close import close_fp64
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
