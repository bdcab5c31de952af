"""Losses per token against scalar twins that also say the derivative; selections by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import (
    cispo,
    clip_cov_selection,
    clipped,
    covariance,
    dppo_kl,
    dppo_kl_clipped,
    dppo_tv,
    dppo_tv_clipped,
    dro,
    kl_cov,
    kl_cov_selection,
    log_ratio,
    ppo_clip,
    reinforce,
    sapo,
    value_clipped,
    value_loss,
)
from tests.close import close_fp32, close_fp64

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Twin = Callable[[float, float, float], tuple[float, float]]
INFINITY = math.inf


def ratio_of(p: float, s: float) -> float:
    return math.exp(min(max(p - s, -20.0), 20.0))


def reinforce_twin(p: float, s: float, a: float) -> tuple[float, float]:
    return -a * p, -a


def ppo_twin(p: float, s: float, a: float, dual: float | None = None) -> tuple[float, float]:
    ratio = ratio_of(p, s)
    free, held = -a * ratio, -a * min(max(ratio, 1 - 0.2), 1 + 0.28)
    if dual is not None and a < 0 and max(free, held) > -a * dual:
        return -a * dual, 0.0
    return (free, free) if free >= held else (held, 0.0)


def cispo_twin(p: float, s: float, a: float) -> tuple[float, float]:
    weight = min(max(ratio_of(p, s), 1 - 0.3), 1 + 0.4)
    return -weight * a * p, -weight * a


def sapo_twin(p: float, s: float, a: float) -> tuple[float, float]:
    tau = 0.7 if a > 0 else 1.6
    gate = 1 / (1 + math.exp(-tau * (ratio_of(p, s) - 1)))
    return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * ratio_of(p, s)


def dppo_twin(p: float, s: float, a: float, kind: str) -> tuple[float, float]:
    new, old = math.exp(p), math.exp(s)
    if kind == "tv":
        distance = abs(new - old)
    else:
        distance = old * (s - p) + (1 - old) * math.log((1 - old + 1e-8) / (1 - new + 1e-8))
    out = distance > 0.05 if a > 0 else distance > 0.03
    away = new > old if a > 0 else new < old
    weight = 0.0 if out and away else min(ratio_of(p, s), 1.7)
    return -weight * a * p, -weight * a


def dro_twin(p: float, s: float, a: float) -> tuple[float, float]:
    return -a * p + 0.3 / 2 * (p - s) ** 2, -a + 0.3 * (p - s)


EVERY: dict[str, tuple[Loss, Twin]] = {
    "reinforce": (lambda p, s, a: reinforce(p, a), reinforce_twin),
    "ppo_clip": (partial(ppo_clip, low=0.2, high=0.28), ppo_twin),
    "dual clip": (partial(ppo_clip, low=0.2, high=0.28, dual=1.5), partial(ppo_twin, dual=1.5)),
    "cispo": (partial(cispo, low=0.3, high=0.4), cispo_twin),
    "sapo": (partial(sapo, positive=0.7, negative=1.6), sapo_twin),
    "dppo_tv": (partial(dppo_tv, low=0.03, high=0.05, cap=1.7), partial(dppo_twin, kind="tv")),
    "dppo_kl": (partial(dppo_kl, low=0.03, high=0.05, cap=1.7), partial(dppo_twin, kind="kl")),
    "dro": (partial(dro, beta=0.3), dro_twin),
}


def random_tokens(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of policy and sampler, and advantages of both signs, some 0."""
    generator = torch.Generator().manual_seed(seed)
    policy_T, sampler_T = torch.rand(2, 60, generator=generator, dtype=torch.float64).log()
    advantage_T = torch.randn(60, generator=generator, dtype=torch.float64)
    return policy_T.requires_grad_(), sampler_T, advantage_T.where(advantage_T.abs() > 0.1, 0.0)


def values_and_slopes(loss_T: Tensor, by_T: Tensor) -> tuple[Tensor, Tensor]:
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), by_T)
    return loss_T, gradient_T


@pytest.mark.slow_beyond(24)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", EVERY)
def test_loss_and_gradient_equal_the_scalar_twin(seed: int, name: str) -> None:
    function, twin = EVERY[name]
    policy_T, sampler_T, advantage_T = random_tokens(seed)
    loss_T, gradient_T = values_and_slopes(function(policy_T, sampler_T, advantage_T), policy_T)
    rows = zip(policy_T.tolist(), sampler_T.tolist(), advantage_T.tolist(), strict=True)
    expected = [twin(p, s, a) for p, s, a in rows]
    close_fp64(loss_T, [loss for loss, _ in expected])
    close_fp64(gradient_T, [slope for _, slope in expected])


@pytest.mark.parametrize("name", [*EVERY, "kl_cov"])
def test_nan_stays_in_its_token_and_is_not_hidden(name: str) -> None:
    functions = {key: function for key, (function, _) in EVERY.items()}
    functions["kl_cov"] = lambda p, s, a: kl_cov(p, s, a, a > 0, coefficient=0.3)
    policy_T, sampler_T, advantage_T = random_tokens(0)
    clean_T = functions[name](policy_T, sampler_T, advantage_T)
    broken_T = policy_T.detach().clone()
    broken_T[7] = math.nan
    loss_T = functions[name](broken_T, sampler_T, advantage_T)
    assert loss_T.isnan().nonzero().tolist() == [[7]]
    close_fp64(loss_T[8:], clean_T[8:])


def test_a_policy_without_the_token_counts_as_a_ratio_of_e_to_the_minus_20() -> None:
    policy_T = torch.tensor([-INFINITY], dtype=torch.float64, requires_grad=True)
    loss_T, gradient_T = values_and_slopes(
        ppo_clip(policy_T, torch.tensor([-1.0]), torch.tensor([2.0]), low=0.2, high=0.28), policy_T
    )
    close_fp64(loss_T, [-2 * math.exp(-20)])
    assert gradient_T.item() == 0.0


def gradient(log_ratio: float, advantage: float, dual: float | None = None) -> float:
    policy_T = torch.tensor([log_ratio], requires_grad=True)
    advantage_T = torch.tensor([advantage])
    ppo_clip(policy_T, torch.zeros(1), advantage_T, low=0.2, high=0.28, dual=dual).sum().backward()
    assert policy_T.grad is not None
    return policy_T.grad.item()


def test_no_gradient_beyond_the_clip() -> None:
    assert gradient(0.5, 1.0) == 0.0
    assert gradient(-0.5, -1.0) == 0.0


def test_full_gradient_within_the_clip_and_on_the_way_back() -> None:
    close_fp32(gradient(0.1, 1.0), -math.exp(0.1))
    close_fp32(gradient(-0.5, 1.0), -math.exp(-0.5))
    close_fp32(gradient(0.5, -1.0), math.exp(0.5))


def test_no_gradient_beyond_the_dual_clip() -> None:
    close_fp32(gradient(1.0, -1.0, dual=3.0), math.exp(1.0))
    assert gradient(1.2, -1.0, dual=3.0) == 0.0
    close_fp32(
        ppo_clip(torch.tensor([1.2]), torch.zeros(1), -torch.ones(1), low=0.2, high=0.2, dual=3.0), [3.0]
    )


def test_the_log_ratio_is_at_most_20_either_way() -> None:
    policy_T = torch.tensor([-1.0, -60.0, -3.0])
    close_fp32(log_ratio(policy_T, torch.tensor([-50.0, -1.0, -1.0])), [20.0, -20.0, -2.0])


def test_clipped_names_the_tokens_without_gradient() -> None:
    policy_T = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.5, -0.5, 0.1, -0.1])
    advantage_T = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 1.0, -1.0])
    found = clipped(policy_T, torch.zeros(8), advantage_T, low=0.2, high=0.28)
    assert found.tolist() == [True, False, True, False, False, False, False, False]


def test_a_ratio_exactly_at_the_bound_is_not_clipped() -> None:
    policy_T = torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    assert policy_T.exp().tolist() == [2.0, 0.5]
    found = clipped(policy_T, torch.zeros(2), torch.tensor([1.0, -1.0]), low=0.5, high=1.0)
    assert found.tolist() == [False, False]


def test_dppo_holds_only_what_moves_out() -> None:
    probability_T = torch.tensor([0.5, 0.5, 0.125, 0.125, 0.25], dtype=torch.float64)
    sampler_T = torch.full((5,), 0.25, dtype=torch.float64).log()
    advantage_T = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    found = dppo_tv_clipped(probability_T.log(), sampler_T, advantage_T, low=0.1, high=0.2)
    assert found.tolist() == [True, False, True, False, False]
    # Exactly at the bound.
    found = dppo_tv_clipped(probability_T.log(), sampler_T, advantage_T, low=0.125, high=0.25)
    assert found.tolist() == [False] * 5
    up = 0.25 * math.log(0.5) + 0.75 * math.log(0.75 / 0.5)
    down = 0.25 * math.log(2) + 0.75 * math.log(0.75 / 0.875)
    for slack, expected in ((1e-6, False), (-1e-6, True)):
        bounds = {"low": down + slack, "high": up + slack}
        found = dppo_kl_clipped(probability_T.log(), sampler_T, advantage_T, **bounds)
        assert found.tolist() == [expected, False, expected, False, False]


def test_a_token_without_advantage_is_never_clipped() -> None:
    far_T, sampler_T = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.1, 0.9]).log()
    for function in (clipped, dppo_tv_clipped, dppo_kl_clipped):
        assert function(far_T, sampler_T, torch.zeros(2), low=0.1, high=0.1).tolist() == [False, False]


def test_dppo_kl_is_finite_where_a_token_is_certain() -> None:
    certain, half = torch.zeros(1, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64).log()
    one = torch.ones(1)
    # Half to certain: 0.5 log 0.5 + 0.5 log(0.5 / 1e-8) = 8.5; certain to half: log 2 = 0.69.
    assert not dppo_kl_clipped(certain, half, one, low=0.1, high=8.6).item()
    assert dppo_kl_clipped(certain, half, one, low=0.1, high=8.4).item()
    assert not dppo_kl_clipped(half, certain, -one, low=0.7, high=0.1).item()
    assert dppo_kl_clipped(half, certain, -one, low=0.69, high=0.1).item()


def test_dppo_kl_trusts_a_token_that_did_not_move_though_rounding_left_it_above_1() -> None:
    above_T = torch.tensor([1e-6, 1e-6])
    found = dppo_kl_clipped(above_T, torch.tensor([1e-6, 0.0]), torch.ones(2), low=0.1, high=0.1)
    assert found.tolist() == [False, True]


@pytest.mark.parametrize("seed", range(5))
def test_without_bounds_the_losses_are_reinforce_with_a_ratio(seed: int) -> None:
    policy_T, sampler_T, advantage_T = random_tokens(seed)
    ratio_T = (policy_T - sampler_T).exp().detach()
    _, plain_T = values_and_slopes(reinforce(policy_T, advantage_T), policy_T)
    wide: list[Loss] = [
        partial(cispo, low=1.0, high=INFINITY),
        partial(dppo_tv, low=INFINITY, high=INFINITY, cap=INFINITY),
        partial(dppo_kl, low=INFINITY, high=INFINITY, cap=INFINITY),
        lambda p, s, a: kl_cov(p, s, a, a > 0, coefficient=0.0),
    ]
    for function in wide:
        _, gradient_T = values_and_slopes(function(policy_T, sampler_T, advantage_T), policy_T)
        close_fp64(gradient_T, ratio_T * plain_T)


@pytest.mark.parametrize("seed", range(5))
def test_at_a_ratio_of_1_every_loss_has_the_gradient_of_reinforce(seed: int) -> None:
    policy_T, _, advantage_T = random_tokens(seed)
    _, plain_T = values_and_slopes(reinforce(policy_T, advantage_T), policy_T)
    functions = {name: function for name, (function, _) in EVERY.items()}
    functions["wide clip"] = partial(ppo_clip, low=0.9, high=INFINITY)
    for function in functions.values():
        _, gradient_T = values_and_slopes(function(policy_T, policy_T.detach(), advantage_T), policy_T)
        close_fp64(gradient_T, plain_T)


def test_covariance_by_hand() -> None:
    policy_T = torch.tensor([-1.0, -2.0, -6.0], requires_grad=True)
    found = covariance(policy_T, torch.tensor([4.0, -1.0, 0.0]))
    close_fp32(found, [3.0 * 2.0, -2.0 * 1.0, -1.0 * -3.0])
    assert not found.requires_grad


def test_clip_cov_draws_only_from_the_band_and_from_what_has_a_gradient() -> None:
    covariance_T = torch.tensor([1.0, 1.5, 2.0, 5.0, 3.0, 0.5, 6.0, 4.0])
    clipped_T = torch.tensor([False, False, True, False, False, False, False, False])

    def drawn(fraction: float, seed: int) -> list[bool]:
        generator = torch.Generator().manual_seed(seed)
        return clip_cov_selection(
            covariance_T, clipped_T, fraction=fraction, low=1.0, high=5.0, generator=generator
        ).tolist()

    everything = [False, True, False, False, True, False, False, True]
    assert drawn(1.0, 0) == drawn(0.5, 0) == everything  # int(0.5 x 8) = 4 where there are 3
    assert drawn(0.3, 5) == drawn(0.3, 5)
    twos, ones = [drawn(0.3, seed) for seed in range(60)], [drawn(0.01, seed) for seed in range(60)]
    for found, count in [*((d, 2) for d in twos), *((d, 1) for d in ones)]:
        assert sum(found) == count and not any(f and not e for f, e in zip(found, everything, strict=True))
    for place in (1, 4, 7):  # each is drawn about as often as the others
        assert 10 < sum(found[place] for found in ones) < 30


def test_clip_cov_without_candidates_selects_nothing() -> None:
    found = clip_cov_selection(
        torch.zeros(3),
        torch.zeros(3, dtype=torch.bool),
        fraction=1.0,
        low=1.0,
        high=5.0,
        generator=torch.Generator(),
    )
    assert found.tolist() == [False] * 3


def test_kl_cov_selects_the_largest_and_of_equal_ones_the_first() -> None:
    covariance_T = torch.tensor([1.0, 7.0, 3.0, 3.0, -9.0, 3.0])
    expected = {0.1: [1], 0.34: [1, 2], 0.5: [1, 2, 3], 0.7: [1, 2, 3, 5], 1.0: [0, 1, 2, 3, 4, 5]}
    for fraction, places in expected.items():
        assert kl_cov_selection(covariance_T, fraction=fraction).nonzero().flatten().tolist() == places
    assert kl_cov_selection(torch.zeros(0), fraction=0.5).tolist() == []


def test_kl_cov_adds_the_distance_where_selected() -> None:
    policy_T = torch.tensor([-1.0, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    sampler_T, advantage_T = torch.tensor([-1.5, -1.5, -2.0]), torch.tensor([2.0, 2.0, -1.0])
    selected_T = torch.tensor([True, False, True])
    loss_T, gradient_T = values_and_slopes(
        kl_cov(policy_T, sampler_T, advantage_T, selected_T, coefficient=0.3), policy_T
    )
    up, down = math.exp(0.5), math.exp(-1.0)
    close_fp64(loss_T, [-2 * up + 0.15, -2 * up, down + 0.3])
    close_fp64(gradient_T, [-2 * up + 0.3, -2 * up, down - 0.3])


def test_the_value_loss_by_hand() -> None:
    value_T = torch.tensor([1.0, 3.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    old_T, return_T = torch.tensor([1.2, 1.0, 1.0, 0.0]), torch.tensor([2.0, 4.0, -4.0, 0.1])
    # Within the band; held at 1.7 and worse for it; held at 0.3 and worse for it; within.
    loss_T, gradient_T = values_and_slopes(value_loss(value_T, old_T, return_T, clip=0.7), value_T)
    close_fp64(loss_T, [0.5, 0.5 * 2.3**2, 0.5 * 4.3**2, 0.5 * 0.16], rtol=1e-6)
    close_fp64(gradient_T, [-1.0, 0.0, 0.0, 0.4], rtol=1e-6)
    assert value_clipped(value_T, old_T, return_T, clip=0.7).tolist() == [False, True, True, False]
    for unclipped in (None, INFINITY):
        loss_T, gradient_T = values_and_slopes(
            value_loss(value_T, old_T, return_T, clip=unclipped, coefficient=1.5), value_T
        )
        close_fp64(loss_T, [1.5, 1.5, 6.0, 1.5 * 0.16], rtol=1e-6)
        close_fp64(gradient_T, [-3.0, -3.0, 6.0, 1.2], rtol=1e-6)


def test_a_value_held_on_its_way_to_the_return_keeps_the_larger_error_and_its_gradient() -> None:
    value_T = torch.tensor([3.0], requires_grad=True)
    # Held at 2, from where the return 1 is nearer: the unclipped error 4 counts.
    loss_T, gradient_T = values_and_slopes(
        value_loss(value_T, torch.tensor([1.0]), torch.tensor([1.0]), clip=1.0), value_T
    )
    assert (loss_T.item(), gradient_T.item()) == (2.0, 2.0)
    assert not value_clipped(value_T, torch.tensor([1.0]), torch.tensor([1.0]), clip=1.0).item()
