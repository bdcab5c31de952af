"""Returns and advantages over time on the token MDP: what they expect at each prefix, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms import returns
from millrace.algorithms.losses import reinforce, value_loss
from millrace.foundations.enumerate import exact_gradient, prefix_values
from millrace.foundations.mdp import Floats
from millrace.foundations.occupancy import occupancy
from millrace.foundations.solve import action_values
from tests.close import close_fp64
from tests.estimators.test_advantages import discounted
from tests.estimators.world import TREE, Batch, Path, World, close_to_twin, paths

WORLDS = [World(seed, fresh=True) for seed in range(3)]
STALE = [World(seed) for seed in range(3)]
every_world = pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"seed {world.seed}")
every_stale_world = pytest.mark.parametrize("world", STALE, ids=lambda world: f"seed {world.seed}")
every_lam = pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
every_gamma = pytest.mark.parametrize("gamma", [1.0, 0.7])


def visits(world: World) -> Floats:
    """How often the sampler takes each token after each prefix, [P, V]."""
    policy_SA = np.vstack([world.sampler_PV, np.full(3, 1 / 3)])
    return occupancy(TREE.mdp(world.reward_PV), policy_SA)[:-1]


def quality(world: World, value_P: Floats, gamma: float) -> Floats:
    """q(prefix, token) = r + gamma v of what follows, [P, V]."""
    mdp = TREE.mdp(world.reward_PV, discount=gamma)
    return action_values(mdp, np.append(value_P, 0.0))[:-1]


def mean_at(batch: Batch, number_T: Tensor, *, by_token: bool = False) -> Floats:
    """The expectation of a number at each prefix, [P], or at each prefix and token, [P, V]."""
    chance_T = batch.every.probability_D[batch.every.segment_T]
    place_T = batch.every.prefix_T * 3 + batch.every.token_T
    total, weight = (
        np.bincount(place_T, w, 21).reshape(7, 3) for w in (chance_T * number_T.numpy(), chance_T)
    )
    return total / weight if by_token else total.sum(axis=1) / weight.sum(axis=1)


def climb(world: World, advantage_PV: Floats, visits_PV: Floats) -> Floats:
    """sum_a p(prefix, a) A(prefix, a) grad log pi(a | prefix), [P, V]."""
    worth_PV = visits_PV * advantage_PV
    return worth_PV - world.policy_PV * worth_PV.sum(axis=1, keepdims=True)


def wrong(value_P: Floats) -> Floats:
    """The values of a critic that has not learned yet."""
    return value_P + np.random.default_rng(5).normal(size=value_P.shape)


@every_gamma
@every_world
def test_returns_of_every_kind_expect_the_exact_value_at_each_prefix(world: World, gamma: float) -> None:
    batch, value_P = world.batch(1), world.value_P(discount=gamma)
    value_T = batch.values(value_P)
    setting = (batch.reward_T, value_T, batch.length_B)
    found: dict[str, Tensor] = {
        "Monte Carlo": returns.discounted_returns(batch.reward_T, batch.length_B, gamma=gamma),
        **{f"{n} steps": returns.n_step_returns(*setting, gamma=gamma, num_steps=n) for n in (1, 2, 3, 4)},
        **{
            f"lambda {lam}": returns.td_lambda_returns(*setting, gamma=gamma, lam=lam)
            for lam in (0.0, 0.6, 1.0)
        },
    }
    for number_T in found.values():
        close_fp64(mean_at(batch, number_T), value_P)
        close_fp64(mean_at(batch, number_T, by_token=True), quality(world, value_P, gamma))
    advantage_T, _ = returns.gae(*setting, gamma=gamma, lam=0.6)
    close_fp64(mean_at(batch, advantage_T), np.zeros(7))


@every_lam
@every_world
def test_gae_with_exact_values_is_unbiased_for_every_lambda(world: World, lam: float) -> None:
    batch = world.batch(1)
    advantage_T, _ = returns.gae(
        batch.reward_T, batch.values(world.value_P()), batch.length_B, gamma=1.0, lam=lam
    )
    mean_PV = world.mean(batch, reinforce(batch.policy_T, advantage_T))
    close_fp64(mean_PV, exact_gradient(TREE, world.policy_PV, world.reward_PV))


@every_world
def test_a_discount_without_its_power_in_front_climbs_the_discounted_advantage(world: World) -> None:
    """As everybody does it: states are visited undiscounted, so it is the gradient of no return."""
    batch, value_P = world.batch(1), world.value_P(discount=0.7)
    expected_PV = climb(world, quality(world, value_P, 0.7) - value_P[:, None], visits(world))
    for lam in (0.0, 0.5, 1.0):
        advantage_T, _ = returns.gae(
            batch.reward_T, batch.values(value_P), batch.length_B, gamma=0.7, lam=lam
        )
        close_fp64(world.mean(batch, reinforce(batch.policy_T, advantage_T)), expected_PV)
    for discount in (0.7, 1.0):
        exact_PV = exact_gradient(TREE, world.policy_PV, world.reward_PV, discount=discount)
        assert np.abs(expected_PV - exact_PV).max() > 0.01


@every_world
def test_a_wrong_critic_biases_lambda_0_by_its_error_and_lambda_1_not_at_all(world: World) -> None:
    batch, value_P = world.batch(1), wrong(world.value_P())
    exact_PV = exact_gradient(TREE, world.policy_PV, world.reward_PV)
    zero_PV, one_PV = (
        world.mean(
            batch,
            reinforce(
                batch.policy_T,
                returns.gae(batch.reward_T, batch.values(value_P), batch.length_B, gamma=1.0, lam=lam)[0],
            ),
        )
        for lam in (0.0, 1.0)
    )
    close_fp64(one_PV, exact_PV)
    close_fp64(zero_PV, climb(world, quality(world, value_P, 1.0), visits(world)))
    assert np.abs(zero_PV - exact_PV).max() > 0.02


def gae_twin(
    world: World, value_P: Floats, lam: Callable[[Path], float], gamma: float
) -> Callable[[list[Path]], list[list[float]]]:
    def row(path: Path) -> list[float]:
        values = [*value_P[path.prefixes], 0.0]
        deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(path.rewards)]
        decay = gamma * lam(path)
        return [sum(decay ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]

    return lambda drawn: [row(path) for path in drawn]


@every_world
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_mean_and_variance_of_gae_are_those_of_its_definition(world: World, lam: float) -> None:
    batch, value_P = world.batch(1), wrong(world.value_P(discount=0.9))
    advantage_T, return_T = returns.gae(
        batch.reward_T, batch.values(value_P), batch.length_B, gamma=0.9, lam=lam
    )
    found_DPV = world.gradients(batch, reinforce(batch.policy_T, advantage_T))
    close_to_twin(world, batch, found_DPV, gae_twin(world, value_P, lambda path: lam, 0.9))
    close_fp64(return_T, advantage_T + batch.values(value_P))


@every_world
def test_with_exact_values_more_lambda_is_more_variance(world: World) -> None:
    """Where a token leads is certain, so at lambda 0 the advantage of a token is its exact one."""
    batch, value_P = world.batch(1), world.value_P()
    setting = (batch.reward_T, batch.values(value_P), batch.length_B)
    spread = []
    for lam in (0.0, 0.5, 1.0):
        advantage_T, _ = returns.gae(*setting, gamma=1.0, lam=lam)
        spread.append(batch.every.variance(world.gradients(batch, reinforce(batch.policy_T, advantage_T))))
    assert spread[0] < spread[1] < spread[2]
    exact_PV = quality(world, value_P, 1.0) - value_P[:, None]
    zero_T, _ = returns.gae(*setting, gamma=1.0, lam=0.0)
    close_fp64(zero_T, exact_PV[batch.every.prefix_T, batch.every.token_T])


@every_world
def test_a_lambda_that_depends_on_the_length_is_biased_even_with_exact_values(world: World) -> None:
    """VAPO's lambda is known only once the sequence has ended, so it sees what comes."""
    batch, value_P = world.batch(1), world.value_P()
    lam_B = returns.length_adaptive_lambda(batch.length_B, alpha=0.8)
    close_fp64(sorted(set(lam_B.tolist())), [0, 1 - 1 / 1.6, 1 - 1 / 2.4])
    advantage_T, _ = returns.gae(batch.reward_T, batch.values(value_P), batch.length_B, gamma=1.0, lam=lam_B)
    found_DPV = world.gradients(batch, reinforce(batch.policy_T, advantage_T))
    twin = gae_twin(world, value_P, lambda path: max(0.0, 1 - 1 / (0.8 * len(path))), 1.0)
    close_to_twin(world, batch, found_DPV, twin)
    exact_PV = exact_gradient(TREE, world.policy_PV, world.reward_PV)
    assert np.abs(batch.every.mean(found_DPV) - exact_PV).max() > 0.003


@pytest.mark.slow_beyond(13)
@every_gamma
@every_lam
@every_stale_world
def test_v_trace_without_bounds_expects_the_values_of_the_policy_in_the_sampler_s_draws(
    world: World, lam: float, gamma: float
) -> None:
    batch, value_P = world.batch(1), world.value_P(discount=gamma)
    advantage_T, target_T = returns.v_trace(
        batch.reward_T,
        batch.values(value_P),
        (batch.policy_T - batch.sampler_T).detach(),
        batch.length_B,
        gamma=gamma,
        lam=lam,
        max_rho=math.inf,
        max_c=math.inf,
    )
    close_fp64(mean_at(batch, target_T), value_P)
    # The gradient is that of the policy in states the sampler visits (Degris et al. 2012).
    exact_PV = quality(world, value_P, gamma) - value_P[:, None]
    visits_P = visits(world).sum(axis=1, keepdims=True)
    mean_PV = world.mean(batch, reinforce(batch.policy_T, advantage_T))
    close_fp64(mean_PV, climb(world, exact_PV, visits_P * world.policy_PV))


@pytest.mark.parametrize(("max_rho", "max_c"), [(1.0, 1.0), (1.3, 0.6), (0.8, 0.8)])
@every_stale_world
def test_bounded_v_trace_expects_the_values_of_the_policy_between(
    world: World, max_rho: float, max_c: float
) -> None:
    """pi_rho ~ min(max_rho mu, pi): Espeholt et al. 2018, section 4.1; max_c changes only the speed."""
    between_PV = np.minimum(max_rho * world.sampler_PV, world.policy_PV)
    between_PV /= between_PV.sum(axis=1, keepdims=True)
    value_P = prefix_values(TREE, between_PV, world.reward_PV, discount=0.9)
    batch = world.batch(1)
    _, target_T = returns.v_trace(
        batch.reward_T,
        batch.values(value_P),
        (batch.policy_T - batch.sampler_T).detach(),
        batch.length_B,
        gamma=0.9,
        max_rho=max_rho,
        max_c=max_c,
    )
    close_fp64(mean_at(batch, target_T), value_P)
    assert np.abs(value_P - world.value_P(discount=0.9)).max() > 0.02


@every_lam
@every_world
def test_v_trace_on_the_policy_s_own_draws_is_gae(world: World, lam: float) -> None:
    batch = world.batch(1)
    setting = (batch.reward_T, batch.values(wrong(world.value_P())))
    for bound in (1.0, 5.0, math.inf):
        found = returns.v_trace(
            *setting,
            torch.zeros_like(batch.reward_T),
            batch.length_B,
            gamma=0.9,
            lam=lam,
            max_rho=bound,
            max_c=bound,
        )
        for one, other in zip(found, returns.gae(*setting, batch.length_B, gamma=0.9, lam=lam), strict=True):
            close_fp64(one, other)


@every_world
def test_lambda_0_and_1_and_one_and_all_steps_are_td_zero_and_monte_carlo(world: World) -> None:
    batch = world.batch(1)
    value_P = wrong(world.value_P())
    setting = (batch.reward_T, batch.values(value_P), batch.length_B)
    next_T = [
        value_P[TREE.prefixes.index((*TREE.prefixes[p], token))]
        if (*TREE.prefixes[p], token) in TREE.prefixes
        else 0
        for p, token in zip(batch.every.prefix_T, batch.every.token_T.tolist(), strict=True)
    ]
    one_step_T = batch.reward_T + 0.9 * torch.tensor(next_T, dtype=torch.float64)
    close_fp64(returns.td_lambda_returns(*setting, gamma=0.9, lam=0.0), one_step_T)
    close_fp64(returns.n_step_returns(*setting, gamma=0.9, num_steps=1), one_step_T)
    close_fp64(returns.gae(*setting, gamma=0.9, lam=0.0)[0], one_step_T - batch.values(value_P))
    whole_T = returns.discounted_returns(batch.reward_T, batch.length_B, gamma=0.9)
    close_fp64(returns.td_lambda_returns(*setting, gamma=0.9, lam=1.0), whole_T)
    close_fp64(returns.n_step_returns(*setting, gamma=0.9, num_steps=3), whole_T)
    close_fp64(returns.gae(*setting, gamma=0.9, lam=1.0)[0], whole_T - batch.values(value_P))


@every_world
def test_the_value_loss_pulls_each_prefix_towards_its_exact_value(world: World) -> None:
    """Its expected gradient is 2 c p(prefix) (v - V): 0 exactly at the exact values."""
    batch, exact_P = world.batch(1), world.value_P()
    return_T = returns.discounted_returns(batch.reward_T, batch.length_B, gamma=1.0)
    chance_T = torch.from_numpy(batch.every.probability_D)[batch.segment_T]
    guess_P = torch.from_numpy(wrong(exact_P)).requires_grad_()
    old_T = guess_P.detach()[batch.prefix_T]
    for clip in (None, 1e6):
        loss_T = value_loss(guess_P[batch.prefix_T], old_T, return_T, clip=clip, coefficient=0.3)
        (slope_P,) = torch.autograd.grad((loss_T * chance_T).sum(), guess_P)
        close_fp64(slope_P, 0.6 * visits(world).sum(axis=1) * (guess_P.detach().numpy() - exact_P))


@every_world
def test_a_clipped_value_loss_leaves_out_what_left_the_band_towards_its_return(world: World) -> None:
    batch, exact_P = world.batch(1), world.value_P()
    return_T = returns.discounted_returns(batch.reward_T, batch.length_B, gamma=1.0)
    chance_T = batch.every.probability_D[batch.every.segment_T]
    old_P, guess_P = exact_P, torch.from_numpy(wrong(exact_P)).requires_grad_()
    loss_T = value_loss(
        guess_P[batch.prefix_T], torch.from_numpy(old_P)[batch.prefix_T], return_T, clip=0.5, coefficient=0.3
    )
    (slope_P,) = torch.autograd.grad((loss_T * torch.from_numpy(chance_T)).sum(), guess_P)
    expected_P = np.zeros(7)
    for prefix, goal, chance in zip(batch.every.prefix_T, return_T.tolist(), chance_T, strict=True):
        guess = guess_P[prefix].item()
        band = min(max(guess, old_P[prefix] - 0.5), old_P[prefix] + 0.5)
        if (guess - goal) ** 2 >= (band - goal) ** 2:
            expected_P[prefix] += 0.6 * chance * (guess - goal)
    close_fp64(slope_P, expected_P)
    unclipped_P = 0.6 * visits(world).sum(axis=1) * (guess_P.detach().numpy() - exact_P)
    assert np.abs(expected_P - unclipped_P).max() > 0.01


@every_world
def test_discounted_returns_are_those_of_their_definition(world: World) -> None:
    batch = world.batch(1)
    return_T = returns.discounted_returns(batch.reward_T, batch.length_B, gamma=0.8)
    close_fp64(return_T, [one for path in paths(world) for one in discounted(path, 0.8)])
