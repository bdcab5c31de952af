from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import ppo_clip
from millrace.algorithms.weights import (
    fixed_length,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum,
    token_weights,
)
from millrace.data.batch import Batch
from tests.algorithms.verl_weights import verl_weights
from tests.close import close_fp32, close_fp64
from tests.golden.verl import CASES, rows

Weights = Callable[[Tensor, Tensor], Tensor]
EVERY: dict[str, Weights] = {
    "token_mean": token_mean,
    "token_sum": token_sum,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "fixed_length": partial(fixed_length, length=7),
}


def weights_loop(name: str, mask: list[bool], segment: list[int]) -> list[float]:
    chosen = [sum(m for m, s in zip(mask, segment, strict=True) if s == b) for b in range(segment[-1] + 1)]
    num_segments = sum(1 for n in chosen if n)
    weight = {
        "token_mean": lambda b: 1 / sum(chosen),
        "token_sum": lambda b: 1.0,
        "sequence_mean": lambda b: 1 / (num_segments * chosen[b]),
        "sequence_sum": lambda b: 1 / num_segments,
        "fixed_length": lambda b: 1 / (num_segments * 7),
    }[name]
    return [weight(b) if m else 0.0 for m, b in zip(mask, segment, strict=True)]


def random_rows(seed: int) -> tuple[Tensor, Tensor]:
    """Action mask and segment of six segments of 1 to 9 tokens; some have no action at all."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(1, 10, (6,), generator=generator)
    segment_T = torch.repeat_interleave(torch.arange(6), length_B)
    mask_T = torch.rand(len(segment_T), generator=generator) < 0.4
    mask_T[-1] = True
    return mask_T, segment_T


@pytest.mark.slow_beyond(15)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", EVERY)
def test_weights_equal_the_loop(seed: int, name: str) -> None:
    mask_T, segment_T = random_rows(seed)
    close_fp32(EVERY[name](mask_T, segment_T), weights_loop(name, mask_T.tolist(), segment_T.tolist()))


def test_the_ways_by_hand() -> None:
    segment_T = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])  # 3 actions, 1 action, none
    mask_T = torch.tensor([False, True, True, True, False, True, False, False])
    third, sixth, half = 1 / 3, 1 / 6, 1 / 2
    close_fp32(token_mean(mask_T, segment_T), [0, 0.25, 0.25, 0.25, 0, 0.25, 0, 0])
    close_fp32(token_sum(mask_T, segment_T), [0, 1, 1, 1, 0, 1, 0, 0])
    close_fp32(sequence_mean(mask_T, segment_T), [0, sixth, sixth, sixth, 0, half, 0, 0])
    close_fp32(sequence_sum(mask_T, segment_T), [0, half, half, half, 0, half, 0, 0])
    close_fp32(fixed_length(mask_T, segment_T, length=3) * 2, [0, third, third, third, 0, third, 0, 0])


@pytest.mark.parametrize("name", EVERY)
def test_no_chosen_token_is_an_error(name: str) -> None:
    with pytest.raises(
        ValueError, match="^no token in the batch was chosen by the policy, so there is nothing"
    ):
        EVERY[name](torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "sequence_sum"])
def test_one_chosen_token_takes_it_all(name: str) -> None:
    assert EVERY[name](torch.tensor([False, True]), torch.zeros(2, dtype=torch.long)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", EVERY)
def test_a_segment_for_each_token_is_demanded(name: str) -> None:
    with pytest.raises(ValueError, match=r"^segment_T has shape \(2,\), but action_mask_T \(3,\)$"):
        EVERY[name](torch.ones(3, dtype=torch.bool), torch.zeros(2, dtype=torch.long))


def test_a_fixed_length_of_0_is_refused_and_of_1_is_taken() -> None:
    mask_T, segment_T = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="^length is 0; it must be above 0$"):
        fixed_length(mask_T, segment_T, length=0)
    assert fixed_length(mask_T, segment_T, length=1).tolist() == [0.5, 0.5]


GOLDEN = [(case, key) for case in CASES for key in case["agg"]]


@pytest.mark.parametrize(("case", "key"), GOLDEN, ids=[f"seed {case['seed']} {key}" for case, key in GOLDEN])
def test_the_weighted_sum_is_the_aggregation_of_verl(case: dict[str, Any], key: str) -> None:
    row = rows(case)
    close_fp64(
        (row.input("advantages") * verl_weights(row, key)).sum(), case["agg"][key], rtol=1e-6, atol=1e-6
    )


def as_batch(mask_T: Tensor, segment_T: Tensor, weight_T: Tensor, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    zero_T = torch.zeros(len(mask_T), dtype=torch.float64)
    return Batch(
        token_T=torch.randint(0, 11, mask_T.shape, generator=generator),
        position_T=zero_T.long(),
        segment_T=segment_T,
        action_mask_T=mask_T,
        sampler_logprob_T=-torch.rand(len(mask_T), generator=generator, dtype=torch.float64),
        version_T=zero_T.long(),
        reward_T=zero_T,
        advantage_T=torch.randn(len(mask_T), generator=generator, dtype=torch.float64),
        weight_T=weight_T.double(),
    )


def loss_and_gradient(micros: list[Batch]) -> tuple[float, Tensor]:
    """Of a policy with one logit per token, over all micro-batches."""
    logit_V = torch.linspace(-1, 1, 11, dtype=torch.float64).requires_grad_()
    total = 0.0
    for micro in micros:
        logprob_T = logit_V.log_softmax(-1)[micro.token_T]
        loss_T = ppo_clip(logprob_T, micro.sampler_logprob_T, micro.advantage_T, low=0.9, high=3.0)
        loss = (loss_T * micro.weight_T).sum()
        loss.backward()
        total += loss.item()
    assert logit_V.grad is not None
    return total, logit_V.grad


@pytest.mark.slow_beyond(7)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_the_same_under_any_split(seed: int, name: str) -> None:
    mask_T, segment_T = random_rows(seed)
    batch = as_batch(mask_T, segment_T, EVERY[name](mask_T, segment_T), seed)
    loss, gradient_V = loss_and_gradient([batch])
    splits = [list(batch.split(size)) for size in (9, 14, 20)]
    splits += [
        [batch.shard(rank, 3) for rank in range(3)],
        [batch.select([5, 0, 3]), batch.select([1, 2, 4])],
    ]
    for micros in splits:
        assert len(micros) > 1 and sum(micro.num_tokens for micro in micros) == batch.num_tokens
        part, part_gradient_V = loss_and_gradient(micros)
        close_fp64(part, loss, atol=1e-12)
        close_fp64(part_gradient_V, gradient_V, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_names_its_token_weights(name, dtype):
    mask_T, segment_T = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 1, 1])
    found_T = token_weights(mask_T, segment_T, kind=name, dtype=dtype, length=7)
    expected_T = EVERY[name](mask_T, segment_T, dtype=dtype)
    assert (found_T.tolist(), found_T.dtype) == (expected_T.tolist(), dtype)


def test_token_weights_without_their_number_or_of_no_kind_are_refused():
    given = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="length is 0; it must be above 0"):
        token_weights(*given, kind="fixed_length", dtype=torch.float32)
    with pytest.raises(ValueError, match="there is no loss aggregation 'mean'"):
        token_weights(*given, kind="mean", dtype=torch.float32)
