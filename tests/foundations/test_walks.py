from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.mdp import deterministic, uniform
from millrace.foundations.occupancy import occupancy_by_step
from millrace.foundations.walks import returns, sample_episodes
from tests.close import close_fp64
from tests.foundations.worlds import corridor, random_mdp, random_policy


def test_returns_by_hand() -> None:
    close_fp64(returns([1.0, -2.0, 4.0], 0.5), [1, 0, 4])
    close_fp64(returns([1.0, -2.0, 4.0], 1.0), [3, 2, 4])
    close_fp64(returns([1.0, -2.0, 4.0], 0.0), [1, -2, 4])
    assert returns([], 0.5).shape == (0,)
    with pytest.raises(ValueError, match=r"^discount is 1.01; it lies in \[0, 1\]$"):
        returns([1.0], 1.01)


def test_a_walk_through_the_corridor_ends_at_the_exit() -> None:
    (episode,) = sample_episodes(corridor(3, discount=1.0), deterministic([1, 1, 1, 0], 2), 1, seed=0)
    assert episode.state_T.tolist() == [0, 1, 2]
    assert episode.action_T.tolist() == [1, 1, 1]
    assert episode.reward_T.tolist() == [-1, -1, -1]
    assert (episode.last_state, episode.ended, episode.num_steps) == (3, True, 3)


def test_an_episode_is_cut_off_after_max_steps() -> None:
    mdp = corridor(3, discount=1.0)
    (episode,) = sample_episodes(mdp, deterministic([1, 0, 1, 0], 2), 1, seed=0, max_steps=5)
    assert episode.state_T.tolist() == [0, 1, 1, 1, 1]
    assert (episode.last_state, episode.ended) == (1, False)


def test_a_horizon_ends_an_episode() -> None:
    episodes = sample_episodes(random_mdp(3, horizon=4), random_policy(0, 4, 5, 3), 3, seed=1)
    assert [(one.num_steps, one.ended) for one in episodes] == [(4, True)] * 3


def test_the_same_seed_gives_the_same_episodes() -> None:
    mdp = random_mdp(2, terminal=True)
    first, again, other = (sample_episodes(mdp, uniform(mdp), 5, seed=seed) for seed in (7, 7, 8))
    words = [[one.state_T.tolist() for one in some] for some in (first, again, other)]
    assert words[0] == words[1] != words[2]
    assert words[0][0] != words[0][1]


@pytest.mark.slow
def test_steps_are_taken_as_often_as_their_probability() -> None:
    mdp, policy_HSA = random_mdp(5, num_states=3, num_actions=2, horizon=3), random_policy(5, 3, 3, 2)
    num = 4000
    count_HSA = np.zeros((3, 3, 2))
    for episode in sample_episodes(mdp, policy_HSA, num, seed=0):
        np.add.at(count_HSA, (np.arange(3), episode.state_T, episode.action_T), 1)
        close_fp64(episode.reward_T, mdp.reward_SA[episode.state_T, episode.action_T])
    share_HSA = occupancy_by_step(mdp, policy_HSA)
    error_HSA = np.sqrt(share_HSA * (1 - share_HSA) / num)
    assert (np.abs(count_HSA / num - share_HSA) <= 4 * error_HSA).all()


def test_a_start_at_the_end_has_no_steps() -> None:
    mdp = corridor(2, discount=1.0)
    at_exit = type(mdp)(mdp.transition_SAS, mdp.reward_SA, 1.0, np.eye(3)[2])
    (episode,) = sample_episodes(at_exit, uniform(mdp), 1, seed=0)
    assert (episode.num_steps, episode.last_state, episode.ended) == (0, 2, True)
