"""AdamW with 8-bit moments against AdamW, and its state through files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from millrace.models.load import ModelError
from millrace.training import optimizer as module
from millrace.training.optimizer import (
    adamw,
    check_eight_bit,
    optimizer_step,
    optimizer_tensors,
    start_optimizer,
)
from millrace.training.sharded import own_parts, read_parts, write_parts
from tests.close import close_fp32

BETAS = (0.9, 0.95)
# 4160 = 16 blocks of 256 and one of 64.
SHAPE = (65, 64)


def wide(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A matrix of enough numbers for codes, and a vector and a matrix of too few."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0]), nn.Linear(SHAPE[0], 2, bias=False)).to(dtype)


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        # Rows of very different size, as layers and words have.
        size = 10.0 ** torch.randint(
            -4, 1, (len(parameter), *[1] * (parameter.ndim - 1)), generator=generator
        )
        parameter.grad = (size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def norms(groups) -> list[float]:
    return [math.hypot(*(float(p.grad.norm()) for p in row)) for row in groups]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range):
    reports = []
    for seed in seeds:
        set_gradients(model, seed)
        rate = 0.01 * (seed + 1)
        reports.append(
            optimizer_step(optimizer, learning_rate=rate, max_grad_norm=1e9, metrics={}, norms=norms)
        )
    return reports


def eight_bit(model: nn.Module, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    return adamw(model, betas=BETAS, weight_decay=weight_decay, eight_bit=True)


def decoded(state: dict[str, Tensor], number: int) -> Tensor:
    """x = s M[code], of blocks of 256."""
    code, table = state[f"state{number}"], state[f"qmap{number}"]
    scale = state[f"absmax{number}"].repeat_interleave(256)[: code.numel()].view_as(code)
    return scale * table[code.long()]


def test_it_steps_as_adamw_does_from_the_moments_that_its_codes_stand_for():
    ours, theirs = wide(), wide()
    optimizer = eight_bit(ours)
    zeros = dict(start_optimizer(optimizer, ours))
    weight = ours[0].weight
    for seed in range(4):
        first, second = decoded(optimizer.state[weight], 1), decoded(optimizer.state[weight], 2)
        theirs.load_state_dict(ours.state_dict())
        twin = adamw(theirs, betas=BETAS, weight_decay=0.1)
        start_optimizer(twin, theirs)
        for parameter in twin.state:
            twin.state[parameter]["step"].fill_(seed)
        twin.state[theirs[0].weight]["exp_avg"].copy_(first)
        twin.state[theirs[0].weight]["exp_avg_sq"].copy_(second)
        reports = [
            train(each, how, range(seed, seed + 1))[0] for each, how in ((ours, optimizer), (theirs, twin))
        ]
        close_fp32(weight, theirs[0].weight)
        close_fp32(reports[0].metrics["grad_norm_matrices"], reports[1].metrics["grad_norm_matrices"])
        # The codes are those of the new moments, to within the largest step of the table.
        state = optimizer.state[weight]
        for number, kind in ((1, "exp_avg"), (2, "exp_avg_sq")):
            exact = twin.state[theirs[0].weight][kind]
            scale = state[f"absmax{number}"].repeat_interleave(256)[: exact.numel()].view_as(exact)
            gap = state[f"qmap{number}"].sort().values.diff().max()
            assert ((decoded(state, number) - exact).abs() <= gap * scale).all()
    assert zeros["step/0.weight"].item() == 4


def test_small_weights_step_as_with_adamw_bit_for_bit_but_for_rounding():
    ours, theirs = wide(), wide()
    train(ours, eight_bit(ours), range(5))
    train(theirs, adamw(theirs, betas=BETAS, weight_decay=0.1), range(5))
    for name in ("0.bias", "1.weight"):
        close_fp32(ours.get_parameter(name), theirs.get_parameter(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_norms_are_of_what_the_weights_moved(dtype):
    model = wide(dtype=dtype)
    optimizer = eight_bit(model)
    for seed in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        (report,) = train(model, optimizer, range(seed, seed + 1))
        moved = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
        for kind, ndim in (("matrices", 2), ("vectors", 1)):
            expected = math.hypot(*(float(m.norm()) for m in moved if m.ndim == ndim))
            assert expected > 0
            close_fp32(report.metrics[f"update_norm_{kind}"], expected)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_it_finds_the_bottom_of_a_bowl_as_adamw_does():
    """f(w) = sum of c (w - t)^2 / 2, with curvatures c from 0.01 to 1, and noise on its gradient."""
    curvature = torch.logspace(-2, 0, SHAPE[0])[:, None]
    generator = torch.Generator().manual_seed(0)
    target, noise = (torch.randn(2, *SHAPE, generator=generator)).unbind()
    left = []
    for coded in (False, True):
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        nn.init.zeros_(model.weight)
        optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.0, eight_bit=coded)
        path = []
        for step in range(300):
            off = model.weight.detach() - target
            path.append(float((curvature * off**2).sum() / 2))
            model.weight.grad = curvature * off + 0.01 * noise.roll(step)
            rate = 0.03 * (1 - step / 300)
            optimizer_step(optimizer, learning_rate=rate, max_grad_norm=1e9, metrics={}, norms=norms)
        left.append(path)
    exact, ours = left
    assert exact[-1] < 1e-3 * exact[0] and ours[-1] < 1e-3 * exact[0]
    # All the way, within a hundredth of where it began.
    close_fp32(torch.tensor(ours) / exact[0], torch.tensor(exact) / exact[0], rtol=0.0, atol=0.01)


def test_its_state_takes_a_quarter_of_the_bytes():
    model = wide()
    optimizer = eight_bit(model)
    train(model, optimizer, range(1))
    found: dict[str, int] = {}
    for name, tensor in optimizer_tensors(optimizer, model).items():
        kind, _, weight = name.partition("/")
        if kind != "step":
            found[weight] = found.get(weight, 0) + tensor.nbytes
    # A byte for each number of two moments, and a scale for each of 17 blocks of both.
    assert found == {"0.weight": 2 * 65 * 64 + 2 * 4 * 17, "0.bias": 8 * 65, "1.weight": 8 * 2 * 65}


def test_its_state_goes_through_files_and_the_next_steps_are_bit_equal(tmp_path: Path):
    straight, resumed = wide(), wide(1)
    optimizer = eight_bit(straight)
    train(straight, optimizer, range(3))
    write_parts(own_parts(optimizer_tensors(optimizer, straight)), tmp_path, rank=0)

    resumed.load_state_dict(straight.state_dict())
    fresh = eight_bit(resumed)
    into = start_optimizer(fresh, resumed)
    assert into.keys() == optimizer_tensors(optimizer, straight).keys()
    read_parts(tmp_path, into, set(into))
    assert into["step/0.weight"].item() == into["step/0.bias"].item() == 3
    reports = [train(each, how, range(3, 6)) for each, how in ((straight, optimizer), (resumed, fresh))]
    assert [report.metrics for report in reports[0]] == [report.metrics for report in reports[1]]
    for found, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)
    for name, tensor in optimizer_tensors(fresh, resumed).items():
        assert torch.equal(tensor, optimizer_tensors(optimizer, straight)[name]), name


def test_what_cannot_be_had_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    key = "policy.optimizer.kind adamw_8bit"
    check_eight_bit(wide().parameters())
    with pytest.raises(ModelError) as error:
        check_eight_bit(wide(dtype=torch.float64).parameters())
    assert str(error.value) == (
        f"{key} computes in float32, and precision is float64; set kind: adamw, or precision: float32"
    )
    check_eight_bit([torch.zeros(4096)])
    with pytest.raises(ModelError) as error:
        check_eight_bit([torch.zeros(4095), torch.zeros(3)])
    assert str(error.value) == (
        f"{key} has no effect: it leaves weights of fewer than 4096 numbers as they are, and no weight that "
        "learns has more; set adamw"
    )
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as error:
        check_eight_bit(wide().parameters())
    assert str(error.value) == (
        f"{key} needs a package that is not installed; run `pip install 'millrace-rl[bitsandbytes]'` "
        "or set adamw"
    )
