"""Changes lead from one tensor to the other, bit for bit, in as many bytes as were said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyTrainer, imitation
from millrace.transport.delta import BLOCK, apply_changes, changes
from millrace.transport.shared_memory import SharedWeights
from millrace.transport.weight_update import WeightSyncError
from tests.models.tiny import random_batch, tiny_model
from tests.transport.pieces import Elsewhere, bits

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def pair_of(seed: int, dtype: torch.dtype, num: int, num_changed: int) -> tuple[Tensor, Tensor]:
    """Any bits at all, NaN and negative zero among them."""
    generator = torch.Generator().manual_seed(seed)
    width = dtype.itemsize
    old = torch.randint(0, 256, (num * width,), generator=generator, dtype=torch.uint8).view(dtype)
    new = old.clone()
    place = torch.randperm(num, generator=generator)[:num_changed]
    new.view(torch.uint8).view(num, width)[place, 0] ^= 1 + seed % 255
    return old, new


@pytest.mark.slow_beyond(20)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_changes_lead_from_old_to_new(dtype: torch.dtype, seed: int) -> None:
    num = [1000, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 2 * BLOCK][seed]
    num_changed = [1, 3000, 0, BLOCK // 8, 17][seed]
    old, new = pair_of(seed, dtype, num, num_changed)
    packed = changes(old, new)
    assert packed is not None
    assert len(packed) == 4 * -(-num // BLOCK) + (2 + dtype.itemsize) * num_changed
    apply_changes(old, packed, "w")
    assert bits(old) == bits(new)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 498), (torch.float32, 666)])
def test_the_whole_tensor_travels_where_it_is_no_larger(dtype: torch.dtype, most: int) -> None:
    """Of 1000 elements: 4 + (2 + s) N < 1000 s."""
    assert changes(*pair_of(0, dtype, 1000, most - (dtype == torch.float32) * 1)) is not None
    assert changes(*pair_of(0, dtype, 1000, most + 1)) is None


def test_minus_zero_and_a_nan_that_stays() -> None:
    old, new = torch.tensor([0.0] * 9), torch.tensor([-0.0] + [0.0] * 8)
    packed = changes(old, new)
    assert packed is not None and len(packed) == 4 + 6
    still = torch.full((9,), torch.nan)
    packed = changes(still, still.clone())
    assert packed is not None and len(packed) == 4


@pytest.mark.parametrize("harm", ["short", "none", "long", "outside", "negative"])
def test_changes_of_another_tensor_are_refused(harm: str) -> None:
    old, new = pair_of(1, torch.float32, 100, 5)
    packed = changes(old, new)
    assert packed is not None
    if harm == "outside":
        packed[-1] = 255
    elif harm == "negative":
        packed[3] = 255
    else:
        packed = {"short": packed[:-1], "none": packed[:3], "long": torch.cat([packed, packed[:6]])}[harm]
    before = old.clone()
    with pytest.raises(WeightSyncError, match="^the changes of weight w do not fit 100 elements$"):
        apply_changes(old, packed, "w")
    assert bits(old) == bits(before)


def steps(num: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights of a tiny policy in bfloat16, tied ones once, after each of its optimizer steps."""
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.0)
    trainer = PolicyTrainer(
        model,
        imitation,
        optimizer,
        learning_rate=lambda step: 1e-4,
        temperature=1.0,
        max_tokens=1000,
        max_grad_norm=1.0,
    )
    batch = random_batch(0)
    batch = replace(batch, weight_T=batch.action_mask_T / batch.action_mask_T.sum())
    for _ in range(num):
        trainer.forward_backward(batch)
        trainer.optim_step()
        yield list(trainer.named_tensors())


def test_changes_over_optimizer_steps_equal_whole_weights() -> None:
    fractions: list[float] = []
    elsewhere: Elsewhere | None = None
    with closing(SharedWeights(delta=True)) as shared:
        for version, named in enumerate(steps(4)):
            manifest = shared.write(named, version)
            elsewhere = elsewhere or Elsewhere(shared, named)
            elsewhere.receive(manifest, patched=version > 0)
            assert elsewhere.sampler.holds(named)
            fractions.append(shared.metrics.get("weight_sync/payload_fraction", 1.0))
        assert elsewhere is not None
        os.close(elsewhere.memory)
    assert fractions[0] == 1.0
    assert all(0.0 < fraction < 0.5 for fraction in fractions[1:])
