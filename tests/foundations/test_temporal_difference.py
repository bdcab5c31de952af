from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.mdp import Mdp, uniform
from millrace.foundations.model_learning import learn_model
from millrace.foundations.monte_carlo import constant, incremental, one_over_n
from millrace.foundations.solve import action_values, evaluate, policy_iteration
from millrace.foundations.temporal_difference import (
    Practice,
    lambda_returns,
    n_step_td,
    q_learning,
    sarsa,
    td_lambda,
    td_zero,
)
from millrace.foundations.walks import Walk, returns, sample_episodes
from tests.close import close_fp64
from tests.foundations.worlds import corridor, random_mdp, random_policy

SEEDS = range(6)


def random_episodes(seed: int, num: int = 4) -> list[Walk]:
    """Whole episodes and one that was cut off."""
    mdp = random_mdp(seed, terminal=True)
    whole = sample_episodes(mdp, random_policy(seed, 5, 3), num, seed=seed)
    (cut,) = sample_episodes(random_mdp(seed), random_policy(seed, 5, 3), 1, seed=seed, max_steps=4)
    return [*whole, cut]


# 0 -> 1 -> 0 -> end, rewards 1, 3, 2.
ONE = [Walk(np.array([0, 1, 0]), np.zeros(3, dtype=np.int64), np.array([1.0, 3, 2]), 2, True)]


def test_td_zero_by_hand() -> None:
    # Step 1/2, discount 1/2, from (4, 8). 0: 4 + ((1 + 4) - 4) / 2 = 4.5.
    # 1: 8 + ((3 + 2.25) - 8) / 2 = 6.625. 0: 4.5 + (2 - 4.5) / 2 = 3.25.
    found_S = td_zero(ONE, 3, discount=0.5, step=constant(0.5), initial_S=[4, 8, 100])
    close_fp64(found_S, [3.25, 6.625, 100])
    # With 1 / n the second visit of 0 counts half: 5 -> 5 + (2 - 5) / 2.
    close_fp64(td_zero(ONE, 3, discount=0.5, step=one_over_n, initial_S=[4, 8, 0]), [3.5, 5.5, 0])


def test_two_steps_by_hand() -> None:
    # 0: 1 + 3/2 + v0/4 = 3.5 with v0 = 4; 1: 3 + 2/2 = 4; 0: 2. Step 1/2.
    found_S = n_step_td(ONE, 3, num_steps=2, discount=0.5, step=constant(0.5), initial_S=[4, 8, 100])
    close_fp64(found_S, [(4 + 3.5) / 2 / 2 + 1, 6, 100])


def test_an_episode_that_was_cut_off_is_bootstrapped() -> None:
    cut = [Walk(np.array([0]), np.array([0]), np.array([1.0]), last_state=1, ended=False)]
    for found_S in (
        td_zero(cut, 2, discount=0.5, step=constant(1.0), initial_S=[0, 6]),
        n_step_td(cut, 2, num_steps=9, discount=0.5, step=constant(1.0), initial_S=[0, 6]),
        td_lambda(cut, 2, lam=0.3, discount=0.5, step=constant(1.0), initial_S=[0, 6]),
    ):
        close_fp64(found_S, [4, 6])
    close_fp64(lambda_returns(cut[0], np.array([0.0, 6.0]), lam=1.0, discount=0.5), [4])


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_steps_as_the_episode_has_is_monte_carlo(seed: int) -> None:
    whole = random_episodes(seed)[:-1]
    for step in (constant(0.3), one_over_n):
        close_fp64(
            n_step_td(whole, 5, num_steps=10_000, discount=0.9, step=step, initial_S=range(5)),
            incremental(whole, 5, discount=0.9, step=step, initial_S=range(5)),
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_lambda_0_is_td_zero(seed: int) -> None:
    episodes = random_episodes(seed)
    for step in (constant(0.3), one_over_n):
        close_fp64(
            td_lambda(episodes, 5, lam=0, discount=0.9, step=step, initial_S=range(5)),
            td_zero(episodes, 5, discount=0.9, step=step, initial_S=range(5)),
        )


@pytest.mark.slow_beyond(13)
@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_offline_the_backward_view_is_the_forward_view(seed: int, lam: float) -> None:
    for episode in random_episodes(seed):
        value_S = np.random.default_rng(seed).normal(size=5)
        forward_T = lambda_returns(episode, value_S, lam=lam, discount=0.9)
        expected_S = value_S.copy()
        np.add.at(expected_S, episode.state_T, 0.2 * (forward_T - value_S[episode.state_T]))
        found_S = td_lambda(
            [episode], 5, lam=lam, discount=0.9, step=constant(0.2), offline=True, initial_S=value_S
        )
        close_fp64(found_S, expected_S)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lambda_return_is_the_weighted_mean_of_the_n_step_returns(seed: int) -> None:
    lam, discount = 0.7, 0.9
    value_S = np.random.default_rng(seed).normal(size=5)
    for episode in random_episodes(seed):
        state_T, num = [*episode.state_T, episode.last_state], episode.num_steps
        after_T = [value_S[s] for s in state_T]
        after_T[-1] *= not episode.ended
        for t, found in enumerate(lambda_returns(episode, value_S, lam=lam, discount=discount)):
            n_step = [
                sum(discount**k * episode.reward_T[t + k] for k in range(n)) + discount**n * after_T[t + n]
                for n in range(1, num - t + 1)
            ]
            shares = [(1 - lam) * lam ** (n - 1) for n in range(1, num - t)] + [lam ** (num - t - 1)]
            close_fp64(found, sum(share * one for share, one in zip(shares, n_step, strict=True)))
    whole = random_episodes(seed)[0]
    close_fp64(lambda_returns(whole, value_S, lam=1.0, discount=0.9), returns(whole.reward_T, 0.9))


def test_online_updates_are_seen_at_once() -> None:
    # lambda 1/2, discount 1/2, step 1/2, from (4, 8). Step 0: delta 1 + 4 - 4 = 1, e0 = 1: v0 = 4.5.
    # Step 1: delta 3 + 2.25 - 8 = -2.75, e = (1/4, 1): v = (4.15625, 6.625).
    # Step 2: delta 2 - 4.15625, e = (1/16 + 1, 1/4).
    found_S = td_lambda(ONE, 3, lam=0.5, discount=0.5, step=constant(0.5), initial_S=[4, 8, 100])
    delta = 2 - 4.15625
    close_fp64(found_S, [4.15625 + 0.5 * delta * 1.0625, 6.625 + 0.5 * delta * 0.25, 100])
    # Traces do not outlive their episode.
    twice_S = td_lambda([*ONE, *ONE], 3, lam=0.5, discount=0.5, step=constant(0.5), initial_S=[4, 8, 100])
    again_S = td_lambda(ONE, 3, lam=0.5, discount=0.5, step=constant(0.5), initial_S=found_S)
    close_fp64(twice_S, again_S)


@pytest.mark.slow
def test_td_on_the_same_episodes_again_and_again_finds_the_value_of_the_model_they_make() -> None:
    """Batch TD(0) is certainty equivalence: Sutton and Barto 2018, section 6.3."""
    mdp, policy_SA = random_mdp(3, terminal=True, discount=0.8), random_policy(3, 5, 3)
    episodes = sample_episodes(mdp, policy_SA, 12, seed=0)
    model = learn_model(episodes, 5, 3)
    share_SA = model.count_SAS.sum(axis=2) + 1e-300
    share_SA = share_SA / share_SA.sum(axis=1, keepdims=True)
    exact_S = evaluate(model.mdp(discount=0.8, start_S=mdp.start_S), share_SA)
    value_S = np.zeros(5)
    for _ in range(3000):
        # Offline over the whole batch: the sum of its updates, from the same guess.
        moves = [
            td_lambda([one], 5, lam=0, discount=0.8, step=constant(0.01), offline=True, initial_S=value_S)
            for one in episodes
        ]
        value_S = value_S + sum(move - value_S for move in moves)
    close_fp64(value_S, exact_S, atol=1e-8)


def test_q_learning_finds_the_optimum_of_a_world_without_chance_whatever_it_does() -> None:
    mdp = corridor(4, discount=0.9)
    exact_SA = action_values(mdp, policy_iteration(mdp).value_S)
    found_SA = q_learning(mdp, Practice(200, step=constant(1.0), explore=constant(1.0), seed=0))
    close_fp64(found_SA, exact_SA, atol=1e-9)


@pytest.mark.slow
def test_q_learning_and_greedy_sarsa_come_close_to_the_optimum_of_a_world_with_chance() -> None:
    mdp = random_mdp(1, num_states=4, num_actions=2, terminal=True, discount=0.7)
    exact_SA = action_values(mdp, policy_iteration(mdp).value_S)
    random_SA = action_values(mdp, evaluate(mdp, uniform(mdp)))
    assert np.abs(exact_SA - random_SA).max() > 0.4

    def fades(count: int) -> float:
        return count**-0.7

    learned_SA = q_learning(mdp, Practice(2500, step=fades, explore=constant(0.7), seed=0))
    assert np.abs(learned_SA - exact_SA).max() < 0.1
    # SARSA learns what its own exploring costs: the optimum only as that fades, else the uniform policy.
    greedy_SA = sarsa(mdp, Practice(2500, step=fades, explore=lambda n: 1 / n**0.5, seed=0))
    assert np.abs(greedy_SA.max(axis=1) - exact_SA.max(axis=1)).max() < 0.1
    assert (greedy_SA.argmax(axis=1) == exact_SA.argmax(axis=1)).all()
    uniform_SA = sarsa(mdp, Practice(2500, step=fades, explore=constant(1.0), seed=0))
    assert np.abs(uniform_SA - random_SA).max() < 0.1


def test_sarsa_and_q_learning_by_hand() -> None:
    # 0 -> 1 -> end with two equal actions; q(1, .) begins at (2, 8); without exploring 8 is taken.
    stay = np.eye(3)
    transition_SAS = np.stack([np.stack([stay[1]] * 2), np.stack([stay[2]] * 2), np.stack([stay[2]] * 2)])
    mdp = Mdp(transition_SAS, [[1, 1], [4, 4], [0, 0]], 0.5, [1, 0, 0])  # type: ignore[arg-type]
    initial_SA = [[3, 0], [2, 8], [50, 50]]
    first = Practice(1, step=constant(0.5), explore=lambda n: 0.0, seed=0)
    for method in (sarsa, q_learning):
        # q(0, 0): 3 + (1 + 4 - 3) / 2 = 4; q(1, 1): 8 + (4 - 8) / 2 = 6; the end is worth 0 in any case.
        close_fp64(method(mdp, first, initial_SA=initial_SA), [[4, 0], [2, 6], [0, 0]])
    # Always exploring, SARSA bootstraps from the action it will take, Q-learning from the best.
    wild = Practice(1, step=constant(1.0), explore=constant(1.0), seed=0)
    sarsa_SA, q_SA = (method(mdp, wild, initial_SA=initial_SA) for method in (sarsa, q_learning))
    action = int(np.flatnonzero(sarsa_SA[0] != [3, 0])[0])
    assert q_SA[0, action] == 1 + 8 / 2
    taken = int(np.flatnonzero(sarsa_SA[1] != [2, 8])[0])
    assert sarsa_SA[0, action] == 1 + [2, 8][taken] / 2


def test_step_sizes_are_asked_for_with_the_number_of_updates_of_the_pair() -> None:
    asked: list[int] = []

    def step(count: int) -> float:
        asked.append(count)
        return 1.0

    # Staying is tried twice in each state, since the next action is chosen before the update; then going on.
    q_learning(corridor(2, discount=1.0), Practice(2, step, explore=lambda n: 0.0, seed=0))
    assert asked == [1, 2, 1, 1, 2, 1, 2, 2]


def test_an_episode_of_practice_stops_at_max_steps() -> None:
    mdp = corridor(5, discount=1.0)
    never = Practice(1, step=constant(1.0), explore=lambda n: 0.0, seed=0, max_steps=3)
    # Begins by preferring to go on, so three steps touch three states.
    found_SA = q_learning(mdp, never, initial_SA=np.tile([-9.0, 0.0], (6, 1)))
    assert found_SA[:, 1].tolist() == [-1, -1, -1, 0, 0, 0]


def test_bad_input_is_refused_by_name() -> None:
    words = {"discount": 0.5, "step": constant(0.5)}
    with pytest.raises(ValueError, match=r"^num_steps is 0; it is at least 1$"):
        n_step_td(ONE, 3, num_steps=0, **words)
    with pytest.raises(ValueError, match=r"^lam is 1.5; it lies in \[0, 1\]$"):
        td_lambda(ONE, 3, lam=1.5, **words)
    with pytest.raises(ValueError, match=r"^lam is -0.5; it lies in \[0, 1\]$"):
        lambda_returns(ONE[0], np.zeros(3), lam=-0.5, discount=0.5)
    for call in (
        lambda: td_zero(ONE, 3, discount=2, step=constant(0.5)),
        lambda: td_lambda(ONE, 3, lam=0.5, discount=2, step=constant(0.5)),
        lambda: lambda_returns(ONE[0], np.zeros(3), lam=0.5, discount=2),
    ):
        with pytest.raises(ValueError, match=r"^discount is 2; it lies in \[0, 1\]$"):
            call()
    for method in (sarsa, q_learning):
        with pytest.raises(ValueError, match=r"^explore\(3\) is 3; it lies in \[0, 1\]$"):
            method(corridor(1, discount=1.0), Practice(3, constant(1.0), lambda n: n * (n == 3), seed=0))
        with pytest.raises(ValueError, match=r"^the MDP has horizon 3; backward_induction"):
            method(random_mdp(0, horizon=3), Practice(1, constant(1.0), constant(1.0), seed=0))
        with pytest.raises(ValueError, match=r"^initial_S has shape \(2,\); it must be \(5, 3\)$"):
            method(random_mdp(0), Practice(1, constant(1.0), constant(1.0), seed=0), initial_SA=[0, 0])
