"""Losses per segment against twins that walk over each segment, with their derivative."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import (
    clipped,
    gmpo,
    gspo,
    gspo_token,
    ppo_clip,
    reinforce,
    sequence_log_ratio,
    topr,
)
from millrace.algorithms.weights import sequence_mean
from tests.close import close_fp64

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
LOW, HIGH = 0.15, 0.25


@dataclass(frozen=True, eq=False)
class Row:
    policy_T: Tensor
    sampler_T: Tensor
    advantage_T: Tensor
    segment_T: Tensor
    num_segments: int
    weight_T: Tensor

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        return self.policy_T, self.sampler_T, self.advantage_T, self.segment_T, self.num_segments


def random_row(seed: int, *, flat: bool = False) -> Row:
    """Seven segments of 0 to 6 tokens, the last one empty; `flat`: one advantage a segment."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, 7, (7,), generator=generator)
    length_B[3], length_B[6] = 4, 0
    segment_T = torch.repeat_interleave(torch.arange(7), length_B)
    policy_T, sampler_T, advantage_T, weight_T = torch.randn(
        4, len(segment_T), generator=generator, dtype=torch.float64
    )
    if flat:
        advantage_T = torch.randn(7, generator=generator, dtype=torch.float64)[segment_T]
    sampler_T = -sampler_T.abs() - 0.1
    policy_T = (sampler_T + 0.5 * policy_T).requires_grad_()
    return Row(policy_T, sampler_T, advantage_T, segment_T, 7, weight_T.abs())


def loss_and_gradient(row: Row, function: Loss) -> tuple[Tensor, Tensor]:
    """Loss per token, and the gradient of its weighted sum."""
    loss_T = function(*row.all)
    (gradient_T,) = torch.autograd.grad((loss_T * row.weight_T).sum(), row.policy_T)
    return loss_T, gradient_T


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def gspo_twin(p: list[float], s: list[float], a: list[float], w: list[float], own: bool) -> list[Any]:
    ratio = math.exp(mean([x - y for x, y in zip(p, s, strict=True)]))
    held = min(max(ratio, 1 - LOW), 1 + HIGH)
    loss = [max(-x * ratio, -x * held) for x in a]
    slope = [-x * ratio if -x * ratio >= -x * held else 0.0 for x in a]
    if own:
        return [loss, [x * y for x, y in zip(slope, w, strict=True)]]
    return [loss, [mean([x * y for x, y in zip(slope, w, strict=True)])] * len(p)]


def gmpo_twin(p: list[float], s: list[float], a: list[float], w: list[float]) -> list[Any]:
    log = [x - y for x, y in zip(p, s, strict=True)]
    kept = [min(x, HIGH) if y > 0 else max(x, -LOW) for x, y in zip(log, a, strict=True)]
    loss = -mean(a) * math.exp(mean(kept))
    free = [x == y for x, y in zip(log, kept, strict=True)]
    return [[loss] * len(p), [sum(w) * loss / len(p) if f else 0.0 for f in free]]


def topr_twin(p: list[float], s: list[float], a: list[float], w: list[float]) -> list[Any]:
    ratio = min(1.0, math.exp(sum(x - y for x, y in zip(p, s, strict=True))))
    slope = [-x if x > 0 else -x * ratio for x in a]
    return [[x * y for x, y in zip(slope, p, strict=True)], [x * y for x, y in zip(slope, w, strict=True)]]


EVERY: dict[str, tuple[Loss, Callable[..., list[Any]]]] = {
    "gspo": (partial(gspo, low=LOW, high=HIGH), partial(gspo_twin, own=False)),
    "gspo_token": (partial(gspo_token, low=LOW, high=HIGH), partial(gspo_twin, own=True)),
    "gmpo": (partial(gmpo, low=LOW, high=HIGH), gmpo_twin),
    "topr": (topr, topr_twin),
}


@pytest.mark.slow_beyond(12)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", EVERY)
def test_loss_and_gradient_equal_the_twin_that_walks(seed: int, name: str) -> None:
    function, twin = EVERY[name]
    row = random_row(seed)
    loss_T, gradient_T = loss_and_gradient(row, function)
    for segment in row.segment_T.unique():
        inside_T = row.segment_T == segment
        columns = (row.policy_T, row.sampler_T, row.advantage_T, row.weight_T)
        loss, gradient = twin(*(x[inside_T].tolist() for x in columns))
        close_fp64(loss_T[inside_T], loss)
        close_fp64(gradient_T[inside_T], gradient)


@pytest.mark.parametrize("seed", range(5))
def test_at_length_1_gspo_is_ppo(seed: int) -> None:
    row = random_row(seed)
    place_T = torch.arange(len(row.policy_T))
    for function in (gspo, gspo_token):
        alone_T = function(*row.all[:3], place_T, len(place_T), low=LOW, high=HIGH)
        plain_T = ppo_clip(*row.all[:3], low=LOW, high=HIGH)
        close_fp64(alone_T, plain_T)
        close_fp64(*(torch.autograd.grad(x.sum(), row.policy_T)[0] for x in (alone_T, plain_T)))


@pytest.mark.parametrize("seed", range(5))
def test_with_one_advantage_and_weight_a_segment_both_forms_of_gspo_have_one_gradient(seed: int) -> None:
    row = random_row(seed, flat=True)
    mask_T = torch.ones(len(row.policy_T), dtype=torch.bool)
    flat = Row(*row.all, weight_T=sequence_mean(mask_T, row.segment_T).double())
    bounds = {"low": LOW, "high": HIGH}
    whole, own = (loss_and_gradient(flat, partial(function, **bounds)) for function in (gspo, gspo_token))
    close_fp64(own[0], whole[0])
    close_fp64(own[1], whole[1])
    assert whole[1].abs().max() > 0.01


def test_a_clipped_sequence_is_found_by_its_mean() -> None:
    sampler_T, segment_T = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 0, 2, 2])
    policy_T = torch.tensor([0.9, -0.1, 0.3, -0.4], dtype=torch.float64)
    mean_T = sequence_log_ratio(policy_T, sampler_T, segment_T, 3)
    close_fp64(mean_T, [0.4, 0.4, -0.05, -0.05])
    found = clipped(mean_T, torch.zeros(4), torch.ones(4), low=LOW, high=HIGH)
    assert found.tolist() == [True, True, False, False]


def test_the_log_of_the_token_ratio_is_at_most_10() -> None:
    policy_T = torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    sampler_T, segment_T = torch.tensor([-15.0, -14.0, -9.0]), torch.tensor([0, 0, 1])
    advantage_T = torch.tensor([-1.0, -2.0, -1.0])
    found_T = gspo_token(policy_T, sampler_T, advantage_T, segment_T, 2, low=LOW, high=HIGH)
    close_fp64(found_T, [math.exp(10), 2 * math.exp(10), math.exp(9)])
    (gradient_T,) = torch.autograd.grad(found_T.sum(), policy_T)
    close_fp64(gradient_T, [0.0, 0.0, math.exp(9)])
    # Through the mean the bound is that of every other loss, 20.
    close_fp64(
        gspo(policy_T, sampler_T, advantage_T, segment_T, 2, low=LOW, high=HIGH),
        [math.exp(14), 2 * math.exp(14), math.exp(9)],
    )


def test_gmpo_counts_no_ratio_where_there_is_no_advantage() -> None:
    found = gmpo(
        torch.tensor([2.0, 0.1]),
        torch.zeros(2),
        torch.tensor([0.0, 3.0]),
        torch.zeros(2).long(),
        1,
        low=0.0,
        high=0.2,
    )
    close_fp64(found, [-1.5 * math.exp(0.05)] * 2, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_on_its_own_samples_topr_is_reinforce(seed: int) -> None:
    row = random_row(seed)
    same_T = topr(row.policy_T, row.policy_T.detach(), *row.all[2:])
    close_fp64(same_T, reinforce(row.policy_T, row.advantage_T))


@pytest.mark.parametrize("name", EVERY)
def test_nan_stays_in_its_segment_and_is_not_hidden(name: str) -> None:
    function, _ = EVERY[name]
    row = random_row(2)
    broken_T = row.policy_T.detach().clone()
    broken_T[5] = math.nan
    found_T = function(broken_T, *row.all[1:])
    other_T = row.segment_T != row.segment_T[5]
    assert found_T[5].isnan() and 0 < other_T.sum() < len(broken_T)
    close_fp64(found_T[other_T], function(*row.all)[other_T])


ONE, FIRST = torch.ones(1), torch.zeros(1, dtype=torch.long)
REFUSED: list[tuple[Callable[..., Tensor], dict[str, float], str]] = [
    (gspo, {"low": 1.0, "high": 0.2}, "low is 1.0; it must be at least 0 and below 1"),
    (gspo_token, {"low": 0.2, "high": 0.0}, "high is 0.0; it must be above 0"),
    (gmpo, {"low": -0.1, "high": 0.2}, "low is -0.1; it must be at least 0"),
    (gmpo, {"low": 0.2, "high": 0.0}, "high is 0.0; it must be above 0"),
]


@pytest.mark.parametrize(("function", "settings", "sentence"), REFUSED)
def test_a_setting_out_of_range_is_refused(
    function: Callable[..., Tensor], settings: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        function(ONE, ONE, ONE, FIRST, 1, **settings)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("place", "word"), [(1, "sampler_logprob_T"), (2, "advantage_T"), (3, "segment_T")])
def test_tensors_of_different_shapes_are_refused_by_name(place: int, word: str, name: str) -> None:
    function, _ = EVERY[name]
    tensors = [torch.ones(3), torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.long)]
    tensors[place] = tensors[place][:1]
    with pytest.raises(ValueError, match=rf"^{word} has shape \(1,\), but policy_logprob_T \(3,\)$"):
        function(*tensors, 1)
