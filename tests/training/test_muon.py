"""Which weights torch's Muon moves and which AdamW, its state in checkpoints, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from millrace.config.mesh_section import MeshConfig
from millrace.config.recipe import ConfigError
from millrace.models.load import ModelError
from millrace.models.saving import whole
from millrace.run.build_algorithm import build_optimizer
from millrace.training.muon import muon
from millrace.training.offload import held_tensors
from millrace.training.optimizer import (
    WeightOptimizer,
    adamw,
    optimizer_step,
    optimizer_tensors,
    start_optimizer,
)
from millrace.training.parallel_model import mesh_of, spread_over
from tests.close import close_fp32
from tests.ranks import run_ranks
from tests.run.pieces import recipe
from tests.training.pieces import tiny_model

BETAS = (0.9, 0.95)


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


def step(optimizer: WeightOptimizer, model: nn.Module, seed: int):
    set_gradients(model, seed)

    def norms(rows):
        return [math.sqrt(sum(float((p.grad**2).sum()) for p in row)) for row in rows]

    return optimizer_step(optimizer, learning_rate=0.02, max_grad_norm=1e9, metrics={}, norms=norms)


def test_matrices_inside_layers_move_as_torchs_own_muon_and_the_rest_as_adamw():
    ours, theirs, plain = tiny_model(), tiny_model(), tiny_model()
    names = [name for name, weight in theirs.named_parameters() if weight.ndim == 2 and "layers." in name]
    inside = [dict(theirs.named_parameters())[name] for name in names]
    reference = torch.optim.Muon(inside, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    options = recipe(
        policy={"optimizer": {"kind": "muon", "weight_decay": 0.1, "betas": BETAS}}
    ).policy.optimizer
    optimizer, others = build_optimizer(options, ours), adamw(plain, betas=BETAS, weight_decay=0.1)
    for seed in range(3):
        before = {name: weight.detach().clone() for name, weight in ours.named_parameters()}
        report = step(optimizer, ours, seed)
        step(others, plain, seed)
        set_gradients(theirs, seed)
        reference.step()
        moved = [weight.detach() - before[name] for name, weight in ours.named_parameters() if name in names]
        close_fp32(
            report.metrics["update_norm_matrices"], math.sqrt(sum(float((each**2).sum()) for each in moved))
        )
    assert set(report.metrics) == {
        f"{what}_norm_{kind}" for what in ("grad", "update") for kind in ("matrices", "embeddings", "vectors")
    }
    for name, weight in ours.named_parameters():
        close_fp32(weight, dict((theirs if name in names else plain).named_parameters())[name])


def test_its_state_goes_through_a_checkpoint():
    straight, resumed = tiny_model(), tiny_model()
    ends = [straight.get_input_embeddings().weight], [resumed.get_input_embeddings().weight]
    first, second = (
        muon(model, end, betas=BETAS, weight_decay=0.0)
        for model, end in zip((straight, resumed), ends, strict=True)
    )
    step(first, straight, 0)
    resumed.load_state_dict(straight.state_dict())
    saved = optimizer_tensors(first, straight)
    held = {name for name, _ in held_tensors(("policy", straight, first))}
    assert held >= {f"policy's {place.replace('/', ' ', 1)}" for place in saved}
    into = start_optimizer(second, resumed)
    assert list(into) == list(saved)
    for name, tensor in into.items():
        tensor.copy_(saved[name])
    step(first, straight, 1)
    step(second, resumed, 1)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_model_without_a_matrix_for_it_is_refused():
    with pytest.raises(ModelError, match="policy.optimizer.kind muon has no effect: no matrix that learns"):
        muon(nn.LayerNorm(3), [], betas=BETAS, weight_decay=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": "lion"},
            "policy.optimizer.kind: 'lion' is no optimizer; there are: adamw, adamw_8bit, muon, or your own",
        ),
        ({"min_lr_ratio": 0.5}, "min_lr_ratio has no effect with schedule constant; set linear or cosine"),
    ],
)
def test_settings_of_an_optimizer_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe(policy={"optimizer": changes})


def stepped(rank: int, size: int) -> dict[str, Tensor]:
    """Weights and momentum after three steps of the same gradients, whole."""
    model = tiny_model()
    if size > 1:
        options = MeshConfig(dp_shard=size)
        spread_over(model, mesh_of(options, torch.device("cpu")), options)
    optimizer = muon(model, [model.get_input_embeddings().weight], betas=BETAS, weight_decay=0.1)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        for weight in model.parameters():
            gradient = torch.randn(weight.shape, generator=generator)
            if isinstance(weight, DTensor):
                mesh, placements = weight.device_mesh, weight.placements
                gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            weight.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        optimizer.step()
    found = {name: weight.detach() for name, weight in model.named_parameters()}
    found |= optimizer_tensors(optimizer, model)
    return {name: whole(tensor).clone() for name, tensor in found.items()}


@pytest.mark.world
def test_two_ranks_with_slices_of_the_matrices_do_the_steps_of_one():
    alone = stepped(0, 1)
    assert sum("momentum_buffer" in name for name in alone) > 3
    for found in run_ranks(2, stepped, 2):
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            if name.startswith("step/"):
                assert torch.equal(found[name], expected)
            else:
                close_fp32(found[name], expected, rtol=1e-6, atol=1e-7)
